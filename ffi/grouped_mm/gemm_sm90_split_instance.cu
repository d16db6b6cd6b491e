// Compiled once for each JGG_PLANES and JGG_L_K_MAJOR, see CMakeLists.txt.
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchSplitGemmSm90Instance<JGG_L_K_MAJOR, JGG_PLANES>(
    cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands);
}  // namespace jgg

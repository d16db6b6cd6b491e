// Compiled once for each JGG_ELEMENT and JGG_L_K_MAJOR, see CMakeLists.txt.
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchGemmSm90Instance<JGG_ELEMENT, JGG_L_K_MAJOR>(
    cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands);
}  // namespace jgg

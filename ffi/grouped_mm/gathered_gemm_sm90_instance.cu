// Compiled once for each JGG_ELEMENT and JGG_R_K_MAJOR, see CMakeLists.txt.
#include "grouped_mm/gathered_gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchGatheredGemmSm90Instance<JGG_ELEMENT, JGG_R_K_MAJOR>(
    cudaStream_t stream, GatheredGemmSm90& gathered, const OperandsSm90& operands);
}  // namespace jgg

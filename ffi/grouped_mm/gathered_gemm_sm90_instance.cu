// Compiled once for each JGG_ELEMENT, see CMakeLists.txt.
#include "grouped_mm/gathered_gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchGatheredGemmSm90Instance<JGG_ELEMENT, true>(
    cudaStream_t stream, GatheredGemmSm90& gathered, const OperandsSm90& operands);
template cudaError_t LaunchGatheredGemmSm90Instance<JGG_ELEMENT, false>(
    cudaStream_t stream, GatheredGemmSm90& gathered, const OperandsSm90& operands);
}  // namespace jgg

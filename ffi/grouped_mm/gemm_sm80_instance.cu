// Compiled once for each JGG_ELEMENT and JGG_A_K_MAJOR, see CMakeLists.txt.
#include "grouped_mm/gemm_sm80.cuh"

namespace jgg {
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, JGG_A_K_MAJOR, true>(cudaStream_t stream,
                                                                              const GemmSm80& gemm);
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, JGG_A_K_MAJOR, false>(
    cudaStream_t stream, const GemmSm80& gemm);
}  // namespace jgg

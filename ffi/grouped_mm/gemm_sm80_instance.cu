// Compiled once for each JGG_ELEMENT, see CMakeLists.txt.
#include "grouped_mm/gemm_sm80.cuh"

namespace jgg {
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, true, true>(cudaStream_t stream,
                                                                     const GemmSm80& gemm);
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, true, false>(cudaStream_t stream,
                                                                      const GemmSm80& gemm);
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, false, true>(cudaStream_t stream,
                                                                      const GemmSm80& gemm);
template cudaError_t LaunchGemmSm80Instance<JGG_ELEMENT, false, false>(cudaStream_t stream,
                                                                       const GemmSm80& gemm);
}  // namespace jgg

// Compiled once for each JGG_ELEMENT, see CMakeLists.txt.
#include "quantized/gemm_sm80.cuh"

namespace jgg {
template cudaError_t LaunchQuantizedGemmSm80Instance<JGG_ELEMENT, true>(
    cudaStream_t stream, const QuantizedGemmSm80& gemm);
template cudaError_t LaunchQuantizedGemmSm80Instance<JGG_ELEMENT, false>(
    cudaStream_t stream, const QuantizedGemmSm80& gemm);
}  // namespace jgg

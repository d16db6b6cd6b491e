// Compiled once for each JGG_ELEMENT and JGG_B_K_MAJOR, see CMakeLists.txt.
#include "quantized/gemm_sm80.cuh"

namespace jgg {
template cudaError_t LaunchQuantizedGemmSm80Instance<JGG_ELEMENT, JGG_B_K_MAJOR>(
    cudaStream_t stream, const QuantizedGemmSm80& gemm);
}  // namespace jgg

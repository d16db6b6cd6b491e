// Compiled once for each JGG_MODE and JGG_SCALE_WORDS, see CMakeLists.txt.
#include "quantized/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchQuantizedInstanceSm90<JGG_MODE, JGG_SCALE_WORDS>(
    cudaStream_t stream, QuantizedGemmSm90& quantized, const OperandsSm90& operands);
}  // namespace jgg

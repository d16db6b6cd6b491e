// Compiled once for each JGG_LAUNCH, JGG_MODE and JGG_NUMBER (scale words, or bits), see
// CMakeLists.txt.
#include "quantized/gemm_sm90.cuh"

namespace jgg {
template cudaError_t JGG_LAUNCH<JGG_MODE, JGG_NUMBER>(cudaStream_t stream,
                                                      QuantizedGemmSm90& quantized,
                                                      const OperandsSm90& operands);
}  // namespace jgg

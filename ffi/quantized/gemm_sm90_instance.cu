// Compiled once for each JGG_MODE and JGG_BITS, see CMakeLists.txt.
#include "quantized/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchPackedInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                  QuantizedGemmSm90& quantized,
                                                                  const OperandsSm90& operands);
template cudaError_t LaunchLinearInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                  QuantizedGemmSm90& quantized,
                                                                  const OperandsSm90& operands);
}  // namespace jgg

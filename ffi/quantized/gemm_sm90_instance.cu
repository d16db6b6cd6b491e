// Compiled once for each JGG_MODE and JGG_BITS, with JGG_LINEAR where there is a kernel for weights
// as they are stored, see CMakeLists.txt.
#include "quantized/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchPackedInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                  QuantizedGemmSm90& quantized,
                                                                  const OperandsSm90& operands);
#ifdef JGG_LINEAR
template cudaError_t LaunchLinearInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                  QuantizedGemmSm90& quantized,
                                                                  const OperandsSm90& operands);
#endif
}  // namespace jgg

// Compiled once for each JGG_MODE and JGG_BITS, see CMakeLists.txt.
#include "quantized/gemm_sm90.cuh"

namespace jgg {

#define JGG_INSTANCE(Launch)                                                              \
  template cudaError_t Launch<JGG_MODE, JGG_BITS>(                                        \
      cudaStream_t stream, QuantizedGemmSm90 & quantized, const rules::QmmPlanSm90& plan, \
      const OperandsSm90& operands)

JGG_INSTANCE(LaunchPackedInstanceSm90);
JGG_INSTANCE(LaunchLinearInstanceSm90);

}  // namespace jgg

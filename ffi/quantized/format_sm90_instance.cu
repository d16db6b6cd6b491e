// All Hopper kernels of a format of weights: in a unit of each kind's own, headers would take a
// fifth of the time. Compiled once for each JGG_MODE and JGG_BITS, see CMakeLists.txt.
#include "moe/few_tokens_sm90.cuh"
#include "quantized/gemm_sm90.cuh"
#include "quantized/transposed_sm90.cuh"
#include "quantized/up_and_down_sm90.cuh"

namespace jgg {

#define JGG_INSTANCE(Launch)                                                              \
  template cudaError_t Launch<JGG_MODE, JGG_BITS>(                                        \
      cudaStream_t stream, QuantizedGemmSm90 & quantized, const rules::QmmPlanSm90& plan, \
      const OperandsSm90& operands)

JGG_INSTANCE(LaunchPackedInstanceSm90);
JGG_INSTANCE(LaunchTransposedInstanceSm90);
JGG_INSTANCE(LaunchLinearInstanceSm90);

template cudaError_t LaunchUpAndDownInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                     UpAndDownSm90& both,
                                                                     const OperandsSm90& up,
                                                                     const OperandsSm90& down);

template cudaError_t LaunchFewUpInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                 const FewTokens& experts);
template cudaError_t LaunchFewDownInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                   const FewTokens& experts);

}  // namespace jgg

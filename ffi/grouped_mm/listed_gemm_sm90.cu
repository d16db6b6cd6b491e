#include "grouped_mm/listed_gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchListedGemmSm90Instance<cutlass::bfloat16_t>(cudaStream_t stream,
                                                                       ListedGemmSm90& listed,
                                                                       const OperandsSm90& operands,
                                                                       bool transposed);
#ifndef JGG_SAMPLE
template cudaError_t LaunchListedGemmSm90Instance<cutlass::half_t>(cudaStream_t stream,
                                                                   ListedGemmSm90& listed,
                                                                   const OperandsSm90& operands,
                                                                   bool transposed);
#endif
}  // namespace jgg

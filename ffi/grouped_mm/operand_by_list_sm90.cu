#include "grouped_mm/operand_by_list_sm90.cuh"

namespace jgg {

#define JGG_INSTANCE(Element)                                                         \
  template cudaError_t LaunchOperandByListSm90Instance<Element>(                      \
      cudaStream_t stream, OperandByListSm90 & by_list, const OperandsSm90& operands, \
      bool transposed);                                                               \
  template cudaError_t LaunchBackwardByListSm90Instance<Element>(                     \
      cudaStream_t stream, BackwardByListSm90 & by_list, const OperandsSm90& operands)

JGG_INSTANCE(cutlass::bfloat16_t);
#ifndef JGG_SAMPLE
JGG_INSTANCE(cutlass::half_t);
#endif

}  // namespace jgg

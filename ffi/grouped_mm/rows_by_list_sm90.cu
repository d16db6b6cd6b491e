#include "grouped_mm/rows_by_list_sm90.cuh"

namespace jgg {

#define JGG_INSTANCE(Element, kRKMajor)                                 \
  template cudaError_t LaunchRowsByListSm90Instance<Element, kRKMajor>( \
      cudaStream_t stream, RowsByListSm90 & by_list, const OperandsSm90& operands)

JGG_INSTANCE(cutlass::bfloat16_t, true);
JGG_INSTANCE(cutlass::bfloat16_t, false);
#ifndef JGG_SAMPLE
JGG_INSTANCE(cutlass::half_t, true);
JGG_INSTANCE(cutlass::half_t, false);
#endif

}  // namespace jgg

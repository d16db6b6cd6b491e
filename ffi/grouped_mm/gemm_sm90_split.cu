#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

#define JGG_INSTANCE(kLKMajor, kPlanes)                                \
  template cudaError_t LaunchSplitGemmSm90Instance<kLKMajor, kPlanes>( \
      cudaStream_t stream, GemmSm90 & gemm, const OperandsSm90& operands)

JGG_INSTANCE(true, 3);
JGG_INSTANCE(false, 3);
#ifndef JGG_SAMPLE
JGG_INSTANCE(true, 2);
JGG_INSTANCE(false, 2);
#endif

}  // namespace jgg

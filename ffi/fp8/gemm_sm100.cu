// See ffi/sm100.cu.
#include "fp8/gemm_sm100.cuh"

namespace jgg {

#define JGG_INSTANCE(out, wgrad)                                                       \
  template cudaError_t MultiplyFp8Sm100<out, wgrad>(cudaStream_t, const Fp8GemmSm100&, \
                                                    const sm100::ScaledWorkspace&, uint8_t*);

JGG_INSTANCE(cutlass::bfloat16_t, false)
#ifndef JGG_SAMPLE
JGG_INSTANCE(float, false)
JGG_INSTANCE(float, true)
#endif
#undef JGG_INSTANCE

}  // namespace jgg

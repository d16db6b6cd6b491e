// mm with either layout of w, and wgrad: see ffi/sm100.cu.
#include "grouped_mm/gemm_sm100.cuh"

namespace jgg {

#define JGG_INSTANCE(element, out, a_k_major, b_k_major)                  \
  template cudaError_t MultiplySm100<element, out, a_k_major, b_k_major>( \
      cudaStream_t, const GemmSm100&, const sm100::Workspace&, uint8_t*);
#define JGG_INSTANCES(element)                 \
  JGG_INSTANCE(element, element, true, true)   \
  JGG_INSTANCE(element, element, true, false)  \
  JGG_INSTANCE(element, element, false, false) \
  JGG_INSTANCE(element, float, true, true)     \
  JGG_INSTANCE(element, float, true, false)    \
  JGG_INSTANCE(element, float, false, false)

JGG_INSTANCES(cutlass::bfloat16_t)
#ifndef JGG_SAMPLE
JGG_INSTANCES(cutlass::half_t)
#endif
#undef JGG_INSTANCES
#undef JGG_INSTANCE

}  // namespace jgg

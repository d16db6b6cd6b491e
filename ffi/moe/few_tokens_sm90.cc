// From run-time modes to one of the instances of ../quantized/format_sm90_instance.cu.
#include "moe/few_tokens_sm90.h"

#include "quantized/instances_sm90.h"

namespace jgg {

cudaError_t LaunchFewUpSm90(cudaStream_t stream, const FewTokens& experts, const Coding& coding) {
#ifdef JGG_SM90
  return LaunchInstanceSm90(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchFewUpInstanceSm90<Of::kMode, Of::kBits>(stream, experts);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t LaunchFewDownSm90(cudaStream_t stream, const FewTokens& experts, const Coding& coding) {
#ifdef JGG_SM90
  return LaunchInstanceSm90(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchFewDownInstanceSm90<Of::kMode, Of::kBits>(stream, experts);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

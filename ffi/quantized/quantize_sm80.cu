// Compiled once for each JGG_DTYPE, see CMakeLists.txt.
#include "quantized/quantize_sm80.h"

#include "common/arch.h"
#include "quantized/quantize_sm80.cuh"

namespace jgg {

template <>
cudaError_t QuantizeSm80Instance<JGG_DTYPE>(cudaStream_t stream, const QuantizeArgs& args) {
  const int processors = Processors();
  if (processors == 0) return cudaErrorInvalidDevice;
  const auto launch = [&](auto coder, int blocks, const device::QuantizeParams& p) {
    device::QuantizeKernel<decltype(coder)><<<blocks, device::kQuantizeThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  return LaunchQuantize<JGG_DTYPE>(args, processors, launch);
}

}  // namespace jgg

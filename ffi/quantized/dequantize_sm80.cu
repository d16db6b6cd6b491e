// Compiled once for each JGG_DTYPE, see CMakeLists.txt.
#include "quantized/dequantize_sm80.h"

#include "common/arch.h"
#include "quantized/dequantize_sm80.cuh"

namespace jgg {

template <>
cudaError_t DequantizeSm80Instance<JGG_DTYPE>(cudaStream_t stream, const DequantizeArgs& args) {
  const int processors = Processors();
  if (processors == 0) return cudaErrorInvalidDevice;
  const auto launch = [&](auto decoder, int blocks, const device::DequantizeParams& p) {
    using Decoder = decltype(decoder);
    device::DequantizeKernel<Decoder><<<blocks, device::kDequantizeThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  return LaunchDequantize<JGG_DTYPE>(args, processors, launch);
}

}  // namespace jgg

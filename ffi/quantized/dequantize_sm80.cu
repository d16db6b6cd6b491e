#include "quantized/dequantize_sm80.h"

#include "common/arch.h"
#include "quantized/dequantize_sm80.cuh"

namespace jgg {

template <DType kOf>
cudaError_t DequantizeSm80Instance(cudaStream_t stream, const DequantizeArgs& args) {
  const int processors = Processors();
  if (processors == 0) return cudaErrorInvalidDevice;
  const auto launch = [&](auto decoder, int blocks, const device::DequantizeParams& p) {
    using Decoder = decltype(decoder);
    device::DequantizeKernel<Decoder><<<blocks, device::kDequantizeThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  return LaunchDequantize<kOf>(args, processors, launch);
}

template cudaError_t DequantizeSm80Instance<DType::kF32>(cudaStream_t, const DequantizeArgs&);
template cudaError_t DequantizeSm80Instance<DType::kBF16>(cudaStream_t, const DequantizeArgs&);
template cudaError_t DequantizeSm80Instance<DType::kF16>(cudaStream_t, const DequantizeArgs&);

}  // namespace jgg

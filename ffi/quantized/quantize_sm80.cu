#include "quantized/quantize_sm80.h"

#include "common/arch.h"
#include "quantized/quantize_sm80.cuh"

namespace jgg {

template <DType kOf>
cudaError_t QuantizeSm80Instance(cudaStream_t stream, const QuantizeArgs& args) {
  const int processors = Processors();
  if (processors == 0) return cudaErrorInvalidDevice;
  const auto launch = [&](auto coder, int blocks, const device::QuantizeParams& p) {
    device::QuantizeKernel<decltype(coder)><<<blocks, device::kQuantizeThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  return LaunchQuantize<kOf>(args, processors, launch);
}

template cudaError_t QuantizeSm80Instance<DType::kF32>(cudaStream_t, const QuantizeArgs&);
template cudaError_t QuantizeSm80Instance<DType::kBF16>(cudaStream_t, const QuantizeArgs&);
template cudaError_t QuantizeSm80Instance<DType::kF16>(cudaStream_t, const QuantizeArgs&);

}  // namespace jgg

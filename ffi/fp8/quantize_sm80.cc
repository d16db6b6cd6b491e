#include "fp8/quantize_sm80.h"

#include "common/sample.h"

namespace jgg {

cudaError_t LaunchFp8QuantizeSm80(cudaStream_t stream, const Fp8QuantizeSm80& args) {
  switch (args.dtype) {
    case DType::kF32: return LaunchFp8QuantizeSm80Instance<DType::kF32>(stream, args);
    case DType::kBF16: return LaunchFp8QuantizeSm80Instance<DType::kBF16>(stream, args);
    case DType::kF16: break;
  }
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return LaunchFp8QuantizeSm80Instance<DType::kF16>(stream, args);
  }
}

}  // namespace jgg

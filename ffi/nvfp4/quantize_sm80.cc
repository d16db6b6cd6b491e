#include "nvfp4/quantize_sm80.h"

namespace jgg {

cudaError_t LaunchNvfp4QuantizeSm80(cudaStream_t stream, const Nvfp4QuantizeSm80& args) {
  switch (args.dtype) {
    case DType::kF32: return LaunchNvfp4QuantizeSm80Instance<DType::kF32>(stream, args);
    case DType::kBF16: return LaunchNvfp4QuantizeSm80Instance<DType::kBF16>(stream, args);
    case DType::kF16: break;
  }
  return LaunchNvfp4QuantizeSm80Instance<DType::kF16>(stream, args);
}

}  // namespace jgg

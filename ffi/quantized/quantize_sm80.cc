// quantize: w (..., K), in groups along K.
#include "quantized/quantize_sm80.h"

#include "common/arch.h"

namespace jgg {

std::optional<std::string> quantize_sm80_unsupported(const QuantizeArgs& args,
                                                     int compute_capability) {
  const auto aligned = {args.w, static_cast<const void*>(args.q.weight),
                        static_cast<const void*>(args.q.scales)};
  for (const void* data : aligned) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "an operand is not 16-byte aligned";
  }
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t quantize_sm80(cudaStream_t stream, const QuantizeArgs& args) {
  switch (args.dtype) {
    case DType::kF32: return QuantizeSm80Instance<DType::kF32>(stream, args);
    case DType::kBF16: return QuantizeSm80Instance<DType::kBF16>(stream, args);
    case DType::kF16: break;
  }
  return QuantizeSm80Instance<DType::kF16>(stream, args);
}

}  // namespace jgg

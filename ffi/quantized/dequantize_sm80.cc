// dequantize: values (..., K), in groups along K.
#include "quantized/dequantize_sm80.h"

#include "common/arch.h"

namespace jgg {

std::optional<std::string> dequantize_sm80_unsupported(const DequantizeArgs& args,
                                                       int compute_capability) {
  for (const void* data : {args.q.weight, args.q.scales, args.out}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "an operand is not 16-byte aligned";
  }
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t dequantize_sm80(cudaStream_t stream, const DequantizeArgs& args) {
  switch (args.dtype) {
    case DType::kF32: return DequantizeSm80Instance<DType::kF32>(stream, args);
    case DType::kBF16: return DequantizeSm80Instance<DType::kBF16>(stream, args);
    case DType::kF16: break;
  }
  return DequantizeSm80Instance<DType::kF16>(stream, args);
}

}  // namespace jgg

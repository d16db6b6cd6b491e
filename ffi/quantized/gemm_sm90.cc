// From run-time modes to one of the instances of gemm_sm90_instance.cu.
#include "quantized/gemm_sm90.h"

namespace jgg {

cudaError_t LaunchPackedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized, Mode mode,
                                 int bits, const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (mode == Mode::kNvfp4) {
    return LaunchPackedInstanceSm90<Mode::kNvfp4, 4>(stream, quantized, operands);
  }
  if (mode == Mode::kMxfp4) {
    return LaunchPackedInstanceSm90<Mode::kMxfp4, 4>(stream, quantized, operands);
  }
  if (mode == Mode::kMxfp8) {
    return LaunchPackedInstanceSm90<Mode::kMxfp8, 8>(stream, quantized, operands);
  }
  switch (bits) {
    case 2: return LaunchPackedInstanceSm90<Mode::kAffine, 2>(stream, quantized, operands);
    case 3: return LaunchPackedInstanceSm90<Mode::kAffine, 3>(stream, quantized, operands);
    case 4: return LaunchPackedInstanceSm90<Mode::kAffine, 4>(stream, quantized, operands);
    case 5: return LaunchPackedInstanceSm90<Mode::kAffine, 5>(stream, quantized, operands);
    case 6: return LaunchPackedInstanceSm90<Mode::kAffine, 6>(stream, quantized, operands);
    case 8: return LaunchPackedInstanceSm90<Mode::kAffine, 8>(stream, quantized, operands);
  }
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t LaunchLinearGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (cudaError_t error = EncodeTensorMap(operands.r, &quantized.codes_map)) return error;
  switch (coding.mode) {
    case Mode::kNvfp4:
      return LaunchLinearInstanceSm90<Mode::kNvfp4, 4>(stream, quantized, operands);
    case Mode::kMxfp4:
      return LaunchLinearInstanceSm90<Mode::kMxfp4, 4>(stream, quantized, operands);
    case Mode::kMxfp8:
      return LaunchLinearInstanceSm90<Mode::kMxfp8, 8>(stream, quantized, operands);
    case Mode::kAffine:
      switch (coding.bits) {
        case 2: return LaunchLinearInstanceSm90<Mode::kAffine, 2>(stream, quantized, operands);
        case 3: return LaunchLinearInstanceSm90<Mode::kAffine, 3>(stream, quantized, operands);
        case 4: return LaunchLinearInstanceSm90<Mode::kAffine, 4>(stream, quantized, operands);
        case 5: return LaunchLinearInstanceSm90<Mode::kAffine, 5>(stream, quantized, operands);
        case 6: return LaunchLinearInstanceSm90<Mode::kAffine, 6>(stream, quantized, operands);
        case 8: return LaunchLinearInstanceSm90<Mode::kAffine, 8>(stream, quantized, operands);
      }
  }
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

// From run-time modes to one of the instances of gemm_sm90_instance.cu.
#include "quantized/gemm_sm90.h"

namespace jgg {

cudaError_t LaunchQuantizedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized, Mode mode,
                                    int scale_words, const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (mode == Mode::kNvfp4 && scale_words == 1) {
    return LaunchQuantizedInstanceSm90<Mode::kNvfp4, 1>(stream, quantized, operands);
  }
  if (mode == Mode::kMxfp4 && scale_words == 1) {
    return LaunchQuantizedInstanceSm90<Mode::kMxfp4, 1>(stream, quantized, operands);
  }
  if (mode == Mode::kAffine && scale_words == 1) {
    return LaunchQuantizedInstanceSm90<Mode::kAffine, 1>(stream, quantized, operands);
  }
  if (mode == Mode::kAffine && scale_words == 2) {
    return LaunchQuantizedInstanceSm90<Mode::kAffine, 2>(stream, quantized, operands);
  }
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

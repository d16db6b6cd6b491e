// From run-time modes to one of the instances of gemm_sm90_instance.cu.
#include "quantized/gemm_sm90.h"

#include "common/sample.h"

namespace jgg {

QuantizedGemmSm90 MakeQuantizedGemmSm90(const QmmSm90& qmm) {
  QuantizedGemmSm90 quantized{};
  quantized.gemm = MakeGemmSm90(qmm.mm);
  quantized.scales = qmm.scales;
  quantized.global_scale = qmm.global_scale;
  return quantized;
}

#ifdef JGG_SM90
template <Mode kMode_, int kBits_>
struct Instance {
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
};

// launch(Instance), of the one for a mode.
template <typename Launch>
static cudaError_t LaunchInstance(Mode mode, int bits, Launch launch) {
  if (mode == Mode::kNvfp4) return launch(Instance<Mode::kNvfp4, 4>{});
  if (mode == Mode::kMxfp8) return launch(Instance<Mode::kMxfp8, 8>{});
  if (mode == Mode::kAffine && bits == 3) return launch(Instance<Mode::kAffine, 3>{});
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    if (mode == Mode::kMxfp4) return launch(Instance<Mode::kMxfp4, 4>{});
    switch (bits) {
      case 2: return launch(Instance<Mode::kAffine, 2>{});
      case 4: return launch(Instance<Mode::kAffine, 4>{});
      case 5: return launch(Instance<Mode::kAffine, 5>{});
      case 6: return launch(Instance<Mode::kAffine, 6>{});
      case 8: return launch(Instance<Mode::kAffine, 8>{});
    }
    return cudaErrorInvalidValue;
  }
}
#endif

cudaError_t LaunchPackedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const OperandsSm90& operands) {
#ifdef JGG_SM90
  return LaunchInstance(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchPackedInstanceSm90<Of::kMode, Of::kBits>(stream, quantized, operands);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t LaunchLinearGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (cudaError_t error = EncodeTensorMap(operands.r, &quantized.codes_map)) return error;
  return LaunchInstance(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchLinearInstanceSm90<Of::kMode, Of::kBits>(stream, quantized, operands);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

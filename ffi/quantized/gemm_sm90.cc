// From run-time modes to one of the instances of format_sm90_instance.cu.
#include "quantized/gemm_sm90.h"

#include "quantized/instances_sm90.h"

namespace jgg {

QuantizedGemmSm90 MakeQuantizedGemmSm90(const QmmSm90& qmm) {
  QuantizedGemmSm90 quantized{};
  quantized.gemm = MakeGemmSm90(qmm.mm);
  quantized.scales = qmm.scales;
  quantized.global_scale = qmm.global_scale;
  return quantized;
}

cudaError_t LaunchPackedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const rules::QmmPlanSm90& plan,
                                 const OperandsSm90& operands) {
#ifdef JGG_SM90
  return LaunchInstanceSm90(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchPackedInstanceSm90<Of::kMode, Of::kBits>(stream, quantized, plan, operands);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t LaunchTransposedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const Coding& coding, const rules::QmmPlanSm90& plan,
                                     const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (quantized.packed.codes == nullptr) {
    if (cudaError_t error = EncodeTensorMap(operands.r, &quantized.codes_map)) return error;
  }
  return LaunchInstanceSm90(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchTransposedInstanceSm90<Of::kMode, Of::kBits>(stream, quantized, plan, operands);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t LaunchLinearGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const rules::QmmPlanSm90& plan,
                                 const OperandsSm90& operands) {
#ifdef JGG_SM90
  if (cudaError_t error = EncodeTensorMap(operands.r, &quantized.codes_map)) return error;
  return LaunchInstanceSm90(coding.mode, coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchLinearInstanceSm90<Of::kMode, Of::kBits>(stream, quantized, plan, operands);
  });
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

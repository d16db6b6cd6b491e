// From run-time modes to one of the instances of format_sm90_instance.cu.
#include "quantized/gemm_sm90.h"

#include "quantized/instances_sm90.h"
#include "quantized/up_and_down_sm90.h"

namespace jgg {

QuantizedGemmSm90 MakeQuantizedGemmSm90(const QmmSm90& qmm) {
  QuantizedGemmSm90 quantized{};
  quantized.gemm = MakeGemmSm90(qmm.mm);
  quantized.scales = qmm.scales;
  quantized.global_scale = qmm.global_scale;
  quantized.adapter_rank = static_cast<int>(qmm.adapter.rank);
  return quantized;
}

AdapterSpecsSm90 DescribeAdapterSm90(const QmmSm90& qmm, DType dtype) {
  const auto& [rows, weights, rank] = qmm.adapter;
  const ProductSm90& product = qmm.mm.product;
  AdapterSpecsSm90 specs{
      {rows, dtype, rank, product.rows_x, 1, rank, rank},
      {weights, dtype, product.n, rank, product.groups, product.n, rank * product.n}};
  specs.rows.box_lines = 64;
  specs.weights.box_lines = static_cast<int>((rank + 15) / 16 * 16);
  return specs;
}

cudaError_t EncodeAdapterSm90(const QmmSm90& qmm, DType dtype, QuantizedGemmSm90* quantized) {
  if (qmm.adapter.rank == 0) return cudaSuccess;
  const auto specs = DescribeAdapterSm90(qmm, dtype);
  auto& maps = quantized->gemm.rest_maps.r;
  if (cudaError_t error = EncodeTensorMap(specs.rows, &maps[0])) return error;
  return EncodeTensorMap(specs.weights, &maps[1]);
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

cudaError_t LaunchUpAndDownSm90(cudaStream_t stream, const PackedProductSm90& up,
                                const PackedProductSm90& down, int32_t* turns) {
#ifdef JGG_SM90
  UpAndDownSm90 both{{up.quantized, down.quantized}, turns};
  return LaunchInstanceSm90(up.coding.mode, up.coding.bits, [&](auto of) {
    using Of = decltype(of);
    return LaunchUpAndDownInstanceSm90<Of::kMode, Of::kBits>(stream, both, up.operands,
                                                             down.operands);
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

// From run-time types to one of the instances of packed_sm80_instance.cu.
#include "quantized/packed_sm80.h"

#include "common/alignment.h"
#include "common/sample.h"
#include "quantized/gemm_sm90.h"
#include "quantized/rules.h"

namespace jgg {

static PackedGemmSm80 MakePackedGemm(const QmmSm90& qmm, const PackedCodesSm90& packed,
                                     const void* x, DType dtype) {
  const ProductSm90& product = qmm.mm.product;
  PackedGemmSm80 made{};
  made.packed = packed;
  made.scales = qmm.scales;
  made.global_scale = qmm.global_scale;
  GemmSm80& gemm = made.gemm;
  gemm.product = GemmSm80::Product::kMm;
  gemm.order = GemmSm80::Order::kSegments;
  gemm.a = x;
  gemm.out = product.out;
  gemm.out_dtype = product.out_dtype;
  gemm.a_line = qmm.mm.k;
  gemm.a_width = AlignedElements(dtype, x, {gemm.a_line});
  gemm.rows_x = product.rows_x;
  gemm.rows_y = product.rows_y;
  gemm.n = product.n;
  gemm.k = qmm.mm.k;
  gemm.groups = product.groups;
  gemm.out_m = product.out_line;
  gemm.out_n = 1;
  gemm.out_width = WholeAlignedElements(product.out_dtype, product.out, {product.out_line});
  gemm.metadata = product.metadata;
  gemm.epilogue = product.epilogue;
  return made;
}

template <typename Format>
using IsPackedSm80 = std::bool_constant<rules::IsPackedSm80(FactsOf(Format::kMode, Format::kBits))>;
using FormatsSm80 = Filter<IsPackedSm80, Formats>::Type;

cudaError_t QmmPackedSm80(cudaStream_t stream, const QmmSm90& qmm, const PackedCodesSm90& packed,
                          const Coding& coding, const void* x, DType dtype) {
  const PackedGemmSm80 gemm = MakePackedGemm(qmm, packed, x, dtype);
  return FormatsSm80::Dispatch(coding.mode, coding.bits, [&](auto format) {
    return DispatchHalfSm90(dtype, [&](auto x_type) {
      constexpr Mode kMode = decltype(format)::kMode;
      // A sample has bfloat16 x beside mode "nvfp4" alone.
      if constexpr (kSample && (kMode != Mode::kNvfp4 || x_type.value != DType::kBF16)) {
        return cudaErrorNoKernelImageForDevice;
      } else {
        return LaunchPackedInstanceSm80<kMode, x_type.value>(stream, gemm);
      }
    });
  });
}

}  // namespace jgg

// CUDA handler of fp8_grouped_mm: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_mm";

static ffi::Error Fp8GroupedMm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                               ffi::AnyBuffer w, ffi::AnyBuffer w_scales, ffi::AnyBuffer metadata,
                               ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               MetadataAttrs metadata_attrs, bool clears_rest, bool rows_first,
                               bool fast) {
  Fp8GemmSm90 fp8{};
  fp8.fast = fast;
  JGG_RETURN_IF_ERROR(fast ? CheckEitherCodes(kOp, "x", x, &fp8.l_e5m2) : CheckCodes(kOp, "x", x));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "w", w));
  Fp8MmSizes sizes{};
  JGG_RETURN_IF_ERROR(BindFp8Mm(kOp, x, w, &sizes));
  const auto [tokens, k, groups, n] = sizes;
  const int64_t blocks = (k + 127) / 128, columns = (n + 127) / 128;
  const auto* of_x = static_cast<const float*>(x_scales.untyped_data());
  const auto* of_w = static_cast<const float*>(w_scales.untyped_data());
  if (fast) {
    JGG_RETURN_IF_ERROR(CheckScales(kOp, "x_scales", "(1,)", x_scales, {1}));
    JGG_RETURN_IF_ERROR(CheckScales(kOp, "w_scales", "(G,)", w_scales, {groups}));
    fp8.matrix_scales = {of_x, of_w};
  } else {
    JGG_RETURN_IF_ERROR(CheckBlockScales(kOp, x_scales, w_scales, sizes));
    fp8.x_scales = {of_x, blocks};
    fp8.w_scales = {of_w, static_cast<int>(columns), static_cast<int>(blocks)};
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {-1, n}));
  const auto dtype = ToDType(out->element_type());
  if (!dtype) return InvalidArgument(kOp, "out must be bfloat16, float16 or float32");
  if (fast) JGG_RETURN_IF_ERROR(CheckFastOut(kOp, *dtype));
  if (fast && rows_first) return InvalidArgument(kOp, "no fast kernel has rows first");
  if (rows_first && *dtype == DType::kF32) {
    return InvalidArgument(kOp, "there is no kernel with rows first of float32 results");
  }
  MmSm90 mm{};
  ProductSm90& product = mm.product;
  product.rows_x = tokens;
  product.rows_y = out->dimensions()[0];
  JGG_RETURN_IF_ERROR(BindFp8Metadata(kOp, metadata_attrs, metadata, rest, clears_rest, sizes,
                                      product.rows_y, &product.metadata));
  if (product.metadata.kind == MetadataKind::kSegments || product.rows_x != product.rows_y) {
    return InvalidArgument(kOp, "needs sizes, and as many rows of x as of the result");
  }
  if (auto reason = rules::Fp8MmSm90Problem(k, n)) return Unimplemented(kOp, *reason);
  if (const char* problem = GemmSm90Problem(DType::kBF16, ComputeCapability())) {
    return Unimplemented(kOp, problem);
  }
  product.out = out->untyped_data();
  product.out_dtype = *dtype;
  product.out_line = n;
  product.n = n;
  product.groups = groups;
  mm.k = k / 2;  // pairs
  fp8.gemm = MakeGemmSm90(mm);
  return FromCuda(kOp, LaunchFp8(stream, fp8, DescribePairs(x, tokens, 1),
                                 DescribePairs(w, n, groups), rows_first));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedMm, Fp8GroupedMm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x, codes
                           .Arg<ffi::AnyBuffer>()  // x_scales
                           .Arg<ffi::AnyBuffer>()  // w, codes
                           .Arg<ffi::AnyBuffer>()  // w_scales
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // group_offset
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<bool>("clears_rest")
                           .Attr<bool>("rows_first")  // rows are the instruction's M
                           .Attr<bool>("fast"),       // scales are those of matrices
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedMm(XLA_FFI_CallFrame* call_frame) { return kFp8GroupedMm(call_frame); }

}  // namespace jgg

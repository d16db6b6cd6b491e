// CUDA handler of fp8_grouped_wgrad: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_wgrad";

// pairs: a group's rows, in blocks of 128, are so many pairs.
static ffi::Error Fp8GroupedWgrad(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer dy_scales,
                                  ffi::AnyBuffer x, ffi::AnyBuffer x_scales, ffi::AnyBuffer pairs,
                                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                  bool existing_out, bool fast) {
  Fp8GemmSm90 fp8{};
  fp8.fast = fast;
  JGG_RETURN_IF_ERROR(fast ? CheckEitherCodes(kOp, "dy", dy, &fp8.l_e5m2)
                           : CheckCodes(kOp, "dy", dy));
  JGG_RETURN_IF_ERROR(fast ? CheckEitherCodes(kOp, "x", x, &fp8.r_e5m2) : CheckCodes(kOp, "x", x));
  if (fp8.l_e5m2 && fp8.r_e5m2) {
    return Unimplemented(kOp, "there is no kernel of two operands of e5m2");
  }
  Fp8WgradSizes sizes{};
  JGG_RETURN_IF_ERROR(BindFp8Wgrad(kOp, dy, x, &sizes));
  const int64_t n = sizes.n, k = sizes.k, rows = sizes.rows, blocks = rows / 128;
  const int64_t staged = (n + 63) / 64 * kStagedRows;
  const auto* of_dy = static_cast<const float*>(dy_scales.untyped_data());
  const auto* of_x = static_cast<const float*>(x_scales.untyped_data());
  if (fast) {
    JGG_RETURN_IF_ERROR(CheckScales(kOp, "dy_scales", "(1,)", dy_scales, {1}));
    JGG_RETURN_IF_ERROR(CheckScales(kOp, "x_scales", "(1,)", x_scales, {1}));
    fp8.matrix_scales = {of_dy, of_x};
  } else {
    JGG_RETURN_IF_ERROR(
        CheckScales(kOp, "dy_scales", "(T / 128, ceil(N / 64) * 80)", dy_scales, {blocks, staged}));
    JGG_RETURN_IF_ERROR(CheckScales(kOp, "x_scales", "(T / 128, K)", x_scales, {blocks, k}));
    fp8.l_scales = {of_dy, staged};
    fp8.r_scales = {of_x, k};
  }
  const auto dtype = ToDType(out->element_type());
  if (!dtype) return InvalidArgument(kOp, "out must be bfloat16, float16 or float32");
  if (fast) JGG_RETURN_IF_ERROR(CheckFastOut(kOp, *dtype));
  WgradSm90 wgrad{};
  ProductSm90& product = wgrad.product;
  JGG_RETURN_IF_ERROR(
      BindFp8WgradOut(kOp, stream, pairs, rest, *out, existing_out, &sizes, &product.metadata));
  if (const char* problem = GemmSm90Problem(DType::kBF16, ComputeCapability())) {
    return Unimplemented(kOp, problem);
  }
  product.groups = sizes.groups;
  product.epilogue.accumulate = existing_out;
  product.out = out->untyped_data();
  product.out_dtype = *dtype;
  product.out_line = product.n = k;
  product.rows_x = product.rows_y = rows / 2;  // pairs
  wgrad.m = n;
  wgrad.out_group = n * k;
  fp8.gemm = MakeGemmSm90(wgrad);
  return FromCuda(kOp, LaunchFp8(stream, fp8, DescribePairs(dy, n, 1), DescribePairs(x, k, 1)));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedWgrad, Fp8GroupedWgrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // dy, codes
                           .Arg<ffi::AnyBuffer>()  // dy_scales
                           .Arg<ffi::AnyBuffer>()  // x, codes
                           .Arg<ffi::AnyBuffer>()  // x_scales
                           .Arg<ffi::AnyBuffer>()  // pairs
                           .RemainingArgs()        // existing_out
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<bool>("existing_out")
                           .Attr<bool>("fast"),  // scales are those of matrices
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedWgrad(XLA_FFI_CallFrame* call_frame) {
  return kFp8GroupedWgrad(call_frame);
}

}  // namespace jgg

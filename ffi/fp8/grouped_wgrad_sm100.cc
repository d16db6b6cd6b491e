// CUDA handler of fp8_grouped_wgrad on Blackwell: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm100.h"
#include "fp8/rules.h"
#include "grouped_mm/existing_out.h"
#include "grouped_mm/metadata_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_wgrad_sm100";

// sizes: a group's rows, in blocks of 128.
static ffi::Error Fp8GroupedWgradSm100(cudaStream_t stream, ffi::AnyBuffer dy,
                                       ffi::AnyBuffer dy_scales, ffi::AnyBuffer x,
                                       ffi::AnyBuffer x_scales, ffi::AnyBuffer sizes,
                                       ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                       ffi::Result<ffi::BufferR1<ffi::U8>> workspace,
                                       bool existing_out) {
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "dy", dy));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "x", x));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "dy", "(N, T)", dy, {-1, -1}));
  Fp8GemmSm100 fp8{};
  GemmSm100& gemm = fp8.gemm;
  sm100::Product& product = gemm.product;
  product.wgrad = product.k_major = true;
  product.m = dy.dimensions()[0];
  product.rows_x = product.rows_y = dy.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(K, T)", x, {-1, product.rows_x}));
  product.n = x.dimensions()[0];
  const int64_t blocks = product.rows_x / 128;
  JGG_RETURN_IF_ERROR(
      CheckScales(kOp, "dy_scales", "(N, T / 128)", dy_scales, {product.m, blocks}));
  JGG_RETURN_IF_ERROR(CheckScales(kOp, "x_scales", "(K, T / 128)", x_scales, {product.n, blocks}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "out", *out, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(G, N, K)", *out, {-1, product.m, product.n}));
  product.weights = out->dimensions()[0];
  product.in_bytes = 1;
  product.out_bytes = 4;
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, {"sizes", false, false}, sizes, &gemm.metadata));
  if (gemm.metadata.count != product.weights) {
    return InvalidArgument(kOp, "there are ", gemm.metadata.count, " groups and ", product.weights,
                           " matrices");
  }
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {product.m, product.n, product.rows_x, product.weights}, 0));
  Operands operands(kOp, rest);
  if (existing_out) {
    JGG_RETURN_IF_ERROR(BindExistingOut(kOp, stream, &operands, *out));
    fp8.accumulate = true;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (product.rows_x % 128 != 0) {
    return InvalidArgument(kOp, "rows are padded to 128, got ", product.rows_x);
  }
  if (auto reason = rules::Fp8WgradSm90Problem(product.n)) return Unimplemented(kOp, *reason);
  gemm.out_dtype = DType::kF32;
  gemm.a = dy.untyped_data();
  gemm.b = x.untyped_data();
  gemm.out = out->untyped_data();
  gemm.workspace = workspace->untyped_data();
  gemm.workspace_bytes = workspace->dimensions()[0];
  fp8.a_scales = static_cast<const float*>(dy_scales.untyped_data());
  fp8.b_scales = static_cast<const float*>(x_scales.untyped_data());
  if (auto reason = GemmSm100Problem(gemm, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchFp8GemmSm100(stream, fp8));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedWgradSm100, Fp8GroupedWgradSm100,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()          // dy, codes
                           .Arg<ffi::AnyBuffer>()          // dy_scales
                           .Arg<ffi::AnyBuffer>()          // x, codes
                           .Arg<ffi::AnyBuffer>()          // x_scales
                           .Arg<ffi::AnyBuffer>()          // sizes
                           .RemainingArgs()                // existing_out
                           .Ret<ffi::AnyBuffer>()          // out
                           .Ret<ffi::BufferR1<ffi::U8>>()  // workspace
                           .Attr<bool>("existing_out"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedWgradSm100(XLA_FFI_CallFrame* call_frame) {
  return kFp8GroupedWgradSm100(call_frame);
}

}  // namespace jgg

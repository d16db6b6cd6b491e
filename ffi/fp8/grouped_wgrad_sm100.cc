// CUDA handler of fp8_grouped_wgrad on Blackwell: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm100.h"
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
  Fp8WgradSizes wgrad{};
  JGG_RETURN_IF_ERROR(BindFp8Wgrad(kOp, dy, x, &wgrad));
  JGG_RETURN_IF_ERROR(CheckLineScales(kOp, dy_scales, x_scales, wgrad));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "out", *out, ffi::F32, "float32"));
  Fp8GemmSm100 fp8{};
  GemmSm100& gemm = fp8.gemm;
  JGG_RETURN_IF_ERROR(
      BindFp8WgradOut(kOp, stream, sizes, rest, *out, existing_out, &wgrad, &gemm.metadata));
  sm100::Product& product = gemm.product;
  product.wgrad = product.k_major = true;
  product.rows_x = product.rows_y = wgrad.rows;
  product.m = wgrad.n;
  product.n = wgrad.k;
  product.weights = wgrad.groups;
  product.in_bytes = 1;
  product.out_bytes = 4;
  fp8.accumulate = existing_out;
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

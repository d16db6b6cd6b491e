// CUDA handler of fp8_grouped_wgrad by mma.sync: bind, check, launch.
#include "common/alignment.h"
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm89.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_wgrad_sm89";

// pairs: a group's rows, in blocks of 128, are so many pairs.
static ffi::Error Fp8GroupedWgradSm89(cudaStream_t stream, ffi::AnyBuffer dy,
                                      ffi::AnyBuffer dy_scales, ffi::AnyBuffer x,
                                      ffi::AnyBuffer x_scales, ffi::AnyBuffer pairs,
                                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                      bool existing_out) {
  Fp8GemmSm89 fp8{};
  GemmSm80& gemm = fp8.gemm;
  JGG_RETURN_IF_ERROR(CheckEitherCodes(kOp, "dy", dy, &fp8.e5m2));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "x", x));
  Fp8WgradSizes wgrad{};
  JGG_RETURN_IF_ERROR(BindFp8Wgrad(kOp, dy, x, &wgrad));
  JGG_RETURN_IF_ERROR(CheckLineScales(kOp, dy_scales, x_scales, wgrad));
  const auto dtype = ToDType(out->element_type());
  if (!dtype) return InvalidArgument(kOp, "out must be bfloat16, float16 or float32");
  JGG_RETURN_IF_ERROR(
      BindFp8WgradOut(kOp, stream, pairs, rest, *out, existing_out, &wgrad, &gemm.metadata));
  if (auto reason = NeedsComputeCapability(89, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  gemm.m = wgrad.n;
  gemm.n = wgrad.k;
  gemm.groups = wgrad.groups;
  gemm.epilogue.accumulate = existing_out;
  gemm.out = out->untyped_data();
  gemm.out_dtype = *dtype;
  gemm.out_width = WholeAlignedElements(*dtype, gemm.out, {gemm.n});
  fp8.a_scales = static_cast<const float*>(dy_scales.untyped_data());
  fp8.b_scales = static_cast<const float*>(x_scales.untyped_data());
  CompleteWgradSm89(fp8, dy.untyped_data(), x.untyped_data(), wgrad.rows);
  return FromCuda(kOp, RunFp8GemmSm89(stream, fp8));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedWgradSm89, Fp8GroupedWgradSm89,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // dy, codes
                           .Arg<ffi::AnyBuffer>()  // dy_scales
                           .Arg<ffi::AnyBuffer>()  // x, codes
                           .Arg<ffi::AnyBuffer>()  // x_scales
                           .Arg<ffi::AnyBuffer>()  // pairs
                           .RemainingArgs()        // existing_out
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<bool>("existing_out"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedWgradSm89(XLA_FFI_CallFrame* call_frame) {
  return kFp8GroupedWgradSm89(call_frame);
}

}  // namespace jgg

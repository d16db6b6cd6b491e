// CUDA handler of an activation's backward pass whose results are quantized: bind, check, launch.
#include "fp8/activation_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_activation_backward";

static ffi::Error Fp8ActivationBackward(
    cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer d, ffi::AnyBuffer row_scale,
    ffi::AnyBuffer sizes, ffi::AnyBuffer row_seed, ffi::AnyBuffer column_seed,
    ffi::Result<ffi::AnyBuffer> row_codes, ffi::Result<ffi::AnyBuffer> row_scales,
    ffi::Result<ffi::AnyBuffer> column_codes, ffi::Result<ffi::AnyBuffer> column_scales,
    ffi::Result<ffi::AnyBuffer> activated_codes, ffi::Result<ffi::AnyBuffer> activated_scales,
    ffi::Result<ffi::AnyBuffer> sums, ffi::Result<ffi::AnyBuffer> workspace,
    std::string_view activation) {
  Fp8ActivationBackwardSm80 args{};
  JGG_RETURN_IF_ERROR(BindActivation(kOp, activation, h, sizes, *workspace, true, &args.of));
  const int64_t rows = args.of.rows, columns = args.of.columns;
  JGG_RETURN_IF_ERROR(BindActivationBackward(kOp, d, row_scale, &args));
  JGG_RETURN_IF_ERROR(BindSeeds(kOp, row_seed, column_seed, &args.by_rows, &args.by_columns));
  JGG_RETURN_IF_ERROR(
      BindFp8Codes(kOp, "dh", *row_codes, *row_scales, rows, 2 * columns, &args.by_rows));
  JGG_RETURN_IF_ERROR(BindFp8Codes(kOp, "dh along rows", *column_codes, *column_scales, 2 * columns,
                                   args.along, &args.by_columns));
  JGG_RETURN_IF_ERROR(BindFp8Codes(kOp, "the activation along rows", *activated_codes,
                                   *activated_scales, columns, args.along, &args.activated));
  JGG_RETURN_IF_ERROR(BindActivationSums(kOp, *sums, &args));
  return FromCuda(kOp, LaunchFp8ActivationBackwardSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8ActivationBackward, Fp8ActivationBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // d
                           .Arg<ffi::AnyBuffer>()  // row_scale
                           .Arg<ffi::AnyBuffer>()  // sizes
                           .Arg<ffi::AnyBuffer>()  // seed of dh along columns, or empty
                           .Arg<ffi::AnyBuffer>()  // seed of dh along rows, or empty
                           .Ret<ffi::AnyBuffer>()  // dh: codes
                           .Ret<ffi::AnyBuffer>()  // its scales
                           .Ret<ffi::AnyBuffer>()  // dh along rows: codes
                           .Ret<ffi::AnyBuffer>()  // its scales
                           .Ret<ffi::AnyBuffer>()  // the activation along rows: codes
                           .Ret<ffi::AnyBuffer>()  // its scales
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Ret<ffi::AnyBuffer>()  // workspace
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8ActivationBackward(XLA_FFI_CallFrame* call_frame) {
  return kFp8ActivationBackward(call_frame);
}

}  // namespace jgg

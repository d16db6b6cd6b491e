// CUDA handler of an activation that is quantized as it is made: bind, check, launch.
#include "fp8/activation_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Fp8Activation(cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer sizes,
                                ffi::Result<ffi::AnyBuffer> codes,
                                ffi::Result<ffi::AnyBuffer> scales,
                                ffi::Result<ffi::AnyBuffer> workspace,
                                std::string_view activation) {
  constexpr const char* op = "fp8_activation";
  Fp8ActivationSm80 args{};
  JGG_RETURN_IF_ERROR(BindActivation(op, activation, h, sizes, *workspace, false, &args));
  Fp8Codes to{};
  JGG_RETURN_IF_ERROR(BindFp8Codes(op, "codes", *codes, *scales, args.rows, args.columns, &to));
  return FromCuda(op, LaunchFp8ActivationSm80(stream, args, to));
}

XLA_FFI_DEFINE_HANDLER(kFp8Activation, Fp8Activation,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // sizes
                           .Ret<ffi::AnyBuffer>()  // codes
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // workspace
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8Activation(XLA_FFI_CallFrame* call_frame) {
  return kFp8Activation(call_frame);
}

}  // namespace jgg

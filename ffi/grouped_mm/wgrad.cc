// CUDA handler of wgrad: bind, choose, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/wgrad_bind.h"
#include "grouped_mm/wgrad_sm80.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Wgrad(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y,
                        ffi::BufferR2<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out,
                        bool transpose_x, bool transpose_y, bool own_weight) {
  WgradArgs args;
  JGG_RETURN_IF_ERROR(BindWgrad(x, y, segments, *out, transpose_x, transpose_y, own_weight, &args));
  if (auto reason = wgrad_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented("wgrad", *reason);
  }
  return FromCuda("wgrad", wgrad_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kWgrad, Wgrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // y
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<bool>("transpose_x")
                           .Attr<bool>("transpose_y")
                           .Attr<bool>("own_weight"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggWgrad(XLA_FFI_CallFrame* call_frame) { return kWgrad(call_frame); }

}  // namespace jgg

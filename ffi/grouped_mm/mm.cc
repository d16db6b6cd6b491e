// CUDA handler of mm: bind, choose, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/mm_sm80.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Mm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                     ffi::BufferR2<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out,
                     bool transpose_x, bool transpose_w, bool transpose_out) {
  MmArgs args;
  JGG_RETURN_IF_ERROR(BindMm(x, w, segments, *out, transpose_x, transpose_w, transpose_out, &args));
  if (auto reason = mm_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented("mm", *reason);
  }
  return FromCuda("mm", mm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kMm, Mm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // w
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<bool>("transpose_x")
                           .Attr<bool>("transpose_w")
                           .Attr<bool>("transpose_out"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMm(XLA_FFI_CallFrame* call_frame) { return kMm(call_frame); }

}  // namespace jgg

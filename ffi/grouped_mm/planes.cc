// CUDA handler of planes: bind, check, launch.
#include "grouped_mm/planes.h"

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "common/error.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "planes";

static ffi::Error BindPlanes(ffi::AnyBuffer from, ffi::AnyBuffer to, int64_t planes,
                             PlanesArgs* args) {
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "an operand", "(groups, lines, n)", from, {-1, -1, -1}));
  const auto shape = from.dimensions(), out = to.dimensions();
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "a result", "(groups, lines, planes, n)", to, {shape[0], -1, planes, -1}));
  if (from.element_type() != ffi::F32 || to.element_type() != ffi::BF16) {
    return InvalidArgument(kOp, "operands must be float32, results bfloat16");
  }
  if (out[1] < shape[1] || out[3] < shape[2] || out[3] % 8 != 0) {
    return InvalidArgument(kOp, "results need as many lines and values or more, of these a ",
                           "multiple of 8: ", ShapeText(from), " and ", ShapeText(to));
  }
  *args = PlanesArgs{static_cast<const float*>(from.untyped_data()),
                     to.untyped_data(),
                     shape[0],
                     shape[1],
                     shape[2],
                     out[1],
                     out[3]};
  if (reinterpret_cast<uintptr_t>(args->to) % 16 != 0) {
    return InvalidArgument(kOp, "a result is not 16-byte aligned");
  }
  return ffi::Error::Success();
}

static ffi::Error Planes(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b,
                         ffi::Result<ffi::AnyBuffer> out_a, ffi::Result<ffi::AnyBuffer> out_b,
                         int32_t planes) {
  if (planes != 2 && planes != 3) return InvalidArgument(kOp, "planes must be 2 or 3");
  PlanesArgs args_a{}, args_b{};
  JGG_RETURN_IF_ERROR(BindPlanes(a, *out_a, planes, &args_a));
  JGG_RETURN_IF_ERROR(BindPlanes(b, *out_b, planes, &args_b));
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, MakePlanes(stream, args_a, args_b, planes));
}

XLA_FFI_DEFINE_HANDLER(kPlanes, Planes,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int32_t>("planes"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggPlanes(XLA_FFI_CallFrame* call_frame) { return kPlanes(call_frame); }

}  // namespace jgg

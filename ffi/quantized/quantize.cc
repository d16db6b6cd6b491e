// CUDA handler of quantize: bind, check, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "quantized/quantize_bind.h"
#include "quantized/quantize_sm80.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Quantize(cudaStream_t stream, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                           ffi::Result<ffi::AnyBuffer> weight, ffi::Result<ffi::AnyBuffer> scales,
                           ffi::RemainingRets more, QuantizedAttrs quantized) {
  constexpr const char* op = "quantize";
  QuantizeArgs args{};
  JGG_RETURN_IF_ERROR(BindQuantize(op, quantized, w, rest, weight, scales, more, &args));
  if (args.q.coding.HasFloatScales() && args.q.group_size < 32 && args.dtype != DType::kF32) {
    return InvalidArgument(op, "groups of ", args.q.group_size, " need a float32 w");
  }
  if (auto reason = quantize_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return FromCuda(op, quantize_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // w
                           .RemainingArgs()        // global_scale
                           .Ret<ffi::AnyBuffer>()  // weight
                           .Ret<ffi::AnyBuffer>()  // scales
                           .RemainingRets()        // biases
                           .Attr<QuantizedAttrs>("quantized"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQuantize(XLA_FFI_CallFrame* call_frame) { return kQuantize(call_frame); }

}  // namespace jgg

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
  JGG_RETURN_IF_ERROR(CheckFloat(op, "w", w.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(R, K)", w, {-1, -1}));
  QuantizeArgs args{w.untyped_data(), *ToDType(w.element_type()), {}};

  QuantizedBuffers buffers{*weight, *scales, {}, {}};
  Operands operands(op, rest);
  if (quantized.global_scale) {
    const auto scale = operands.Take("global_scale");
    if (!scale) return scale.error();
    buffers.global_scale = *scale;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (more.size() != quantized.biases) {
    return InvalidArgument(op, "has ", 2 + more.size(), " results, expected ",
                           2 + quantized.biases);
  }
  if (quantized.biases) {
    auto biases = more.get<ffi::AnyBuffer>(0);
    if (!biases) return biases.error();
    buffers.biases = **biases;
  }
  JGG_RETURN_IF_ERROR(
      BindQuantizedArray(op, quantized, buffers, w.dimensions()[0], w.dimensions()[1], &args.q));
  if (args.q.coding.HasFloatScales() && args.q.coding.scale_dtype != args.dtype) {
    return InvalidArgument(op, "scales and w must have one dtype");
  }
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

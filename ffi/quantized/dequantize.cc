// CUDA handler of dequantize: bind, check, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "quantized/dequantize_sm80.h"
#include "quantized/quantize_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Dequantize(cudaStream_t stream, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                             QuantizedAttrs quantized, bool ordered) {
  constexpr const char* op = "dequantize";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out->element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(R, K)", *out, {-1, -1}));
  DequantizeArgs args{{}, out->untyped_data(), *ToDType(out->element_type()), ordered};

  JGG_RETURN_IF_ERROR(BindDequantize(op, quantized, weight, scales, rest, out->dimensions()[0],
                                     out->dimensions()[1], &args.q));
  if (ordered && (!args.q.coding.Facts().is_ordered || args.dtype != DType::kBF16 ||
                  quantized.global_scale || out->dimensions()[1] % 128 != 0)) {
    return InvalidArgument(op,
                           "ordered needs mode nvfp4 without global_scale, bfloat16 results, "
                           "and K in whole 128");
  }
  if (auto reason = dequantize_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return FromCuda(op, dequantize_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kDequantize, Dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // biases, global_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<QuantizedAttrs>("quantized")
                           .Attr<bool>("ordered"),  // see DequantizeArgs
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggDequantize(XLA_FFI_CallFrame* call_frame) { return kDequantize(call_frame); }

}  // namespace jgg

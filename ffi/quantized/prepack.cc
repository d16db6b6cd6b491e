// CUDA handler of prepack: bind, check, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "quantized/prepack_sm80.h"
#include "quantized/quantize_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Prepack(cudaStream_t stream, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                          ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                          ffi::Result<ffi::AnyBuffer> out_scales, QuantizedAttrs quantized) {
  constexpr const char* op = "prepack";
  QuantizedBuffers buffers{weight, scales, {}, {}};
  Operands operands(op, rest);
  if (quantized.biases) {
    const auto buffer = operands.Take("biases");
    if (!buffer) return buffer.error();
    buffers.biases = *buffer;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(CheckShape(op, "the packed weight", "(R/64, K/64, 128 * bits)", *out,
                                 {-1, -1, 128 * int64_t{quantized.bits}}));
  const int64_t row_tiles = out->dimensions()[0], k_tiles = out->dimensions()[1];
  PrepackArgs args{
      {}, 64 * row_tiles, 64 * k_tiles, out->untyped_data(), out_scales->untyped_data()};
  if (quantized.global_scale) return InvalidArgument(op, "global_scale is not an operand of it");
  JGG_RETURN_IF_ERROR(BindQuantizedArray(op, quantized, buffers, args.rows, args.k, &args.q));
  PackedScales packed = args.q.coding.Facts().packed_scales_of(args.q.group_size);
  if (args.q.coding.HasFloatScales() && args.q.coding.scale_dtype == DType::kF32) {
    packed.words *= 2;
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "the packed scales", "(R/64, K/64 or 128, words)", *out_scales,
                                 {row_tiles, args.k / packed.k, packed.words}));
  for (const auto& buffer : {*out, *out_scales}) {
    if (buffer.element_type() != ffi::U32) return InvalidArgument(op, "results must be uint32");
  }
  if (auto reason = prepack_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return FromCuda(op, prepack_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kPrepack, Prepack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // biases
                           .Ret<ffi::AnyBuffer>()  // packed weight
                           .Ret<ffi::AnyBuffer>()  // packed scales
                           .Attr<QuantizedAttrs>("quantized"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggPrepack(XLA_FFI_CallFrame* call_frame) { return kPrepack(call_frame); }

}  // namespace jgg

// CUDA handler of qmm: bind, choose, launch.

#include <string_view>

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "quantized/qmm_bind.h"
#include "quantized/qmm_sm80.h"
#include "quantized/qmm_sm90.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Qmm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                      ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> out, std::string_view mode, int32_t bits,
                      int32_t group_size, std::string_view layout, bool transpose_w, bool x_ordered,
                      bool tf32, std::string_view kind, bool swapped, bool in_order, bool biases,
                      bool global_scale, bool group_offset, bool bias, bool row_scale,
                      std::string_view activation) {
  constexpr const char* op = "qmm";
  const auto known_activation = ToActivation(activation);
  if (!known_activation) return InvalidArgument(op, "unknown activation '", activation, "'");
  QmmArgs args{};
  JGG_RETURN_IF_ERROR(
      BindCoding(op, {mode, bits, group_size, layout, biases, global_scale}, &args.w));
  JGG_RETURN_IF_ERROR(
      BindQmm(x, weight, scales, *out, transpose_w, x_ordered, *known_activation, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(op, kind, metadata, swapped, &args.metadata));
  JGG_RETURN_IF_ERROR(
      CheckMm(op, args.metadata, args.rows_x, args.rows, args.w.groups, args.n, args.k));
  args.tf32 = tf32;
  args.in_order = in_order;

  Operands operands(op, rest);
  if (biases) JGG_RETURN_IF_ERROR(BindBiases(op, scales, &operands, &args.w));
  if (global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(op, args.w.groups, args.n, &operands, &args.w.global_scale));
  }
  if (group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, &args.metadata));
  if (bias) JGG_RETURN_IF_ERROR(BindBias(op, &operands, args.w.groups, args.n, &args.epilogue));
  if (row_scale) JGG_RETURN_IF_ERROR(BindRowScale(op, &operands, args.rows, &args.epilogue));
  JGG_RETURN_IF_ERROR(operands.End());
  if (!in_order && args.epilogue.Any()) {
    return InvalidArgument(op, "an epilogue needs segments in order");
  }

  const int capability = ComputeCapability();
  if (x_ordered) {
    if (auto reason = qmm_sm90_unsupported(args, capability)) return Unimplemented(op, *reason);
    return FromCuda(op, qmm_sm90(stream, args));
  }
  if (auto reason = qmm_sm80_unsupported(args, capability)) return Unimplemented(op, *reason);
  return FromCuda(op, qmm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kQmm, Qmm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()  // biases, global_scale, group_offset, bias, row_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<std::string_view>("mode")
                           .Attr<int32_t>("bits")
                           .Attr<int32_t>("group_size")
                           .Attr<std::string_view>("layout")
                           .Attr<bool>("transpose_w")
                           .Attr<bool>("x_ordered")
                           .Attr<bool>("tf32")
                           .Attr<std::string_view>("kind")
                           .Attr<bool>("swapped")
                           .Attr<bool>("in_order")
                           .Attr<bool>("biases")
                           .Attr<bool>("global_scale")
                           .Attr<bool>("group_offset")
                           .Attr<bool>("bias")
                           .Attr<bool>("row_scale")
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmm(XLA_FFI_CallFrame* call_frame) { return kQmm(call_frame); }

}  // namespace jgg

// CUDA handler of qmm: bind, check the plan, launch.

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
                      ffi::Result<ffi::AnyBuffer> out, QuantizedAttrs quantized, QmmAttrs qmm,
                      MetadataAttrs metadata_attrs, EpilogueAttrs epilogue,
                      QmmPlanAttrs plan_attrs) {
  constexpr const char* op = "qmm";
  if (epilogue.existing_out) return InvalidArgument(op, "existing_out is not an operand of it");
  Activation activation = Activation::kNone;
  JGG_RETURN_IF_ERROR(BindActivation(op, epilogue, &activation));
  QmmArgs args{};
  JGG_RETURN_IF_ERROR(BindCoding(op, quantized, "linear", &args.w));
  JGG_RETURN_IF_ERROR(BindQmm(x, weight, scales, *out, qmm, activation, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(op, metadata_attrs, metadata, &args.metadata));
  JGG_RETURN_IF_ERROR(
      CheckMm(op, args.metadata, args.rows_x, args.rows_y, args.w.groups, args.n, args.k));

  Operands operands(op, rest);
  args.scaled =
      args.planned && plan_attrs.way == rules::kQmmWays[static_cast<int>(rules::QmmWay::kScaled)];
  if (args.scaled && args.transpose_w && args.dtype != DType::kF32) {
    JGG_RETURN_IF_ERROR(
        BindXSums(op, args.rows_x, PaddedK(args.k, true) / 128, &operands, &args.x_sums));
  }
  if (quantized.biases) JGG_RETURN_IF_ERROR(BindBiases(op, scales, &operands, &args.w));
  if (quantized.global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(op, args.w.groups, args.n, &operands, &args.w.global_scale));
  }
  if (metadata_attrs.group_offset)
    JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, &args.metadata));
  JGG_RETURN_IF_ERROR(
      BindEpilogue(op, epilogue, args.w.groups, args.n, args.rows_y, &operands, &args.epilogue));
  JGG_RETURN_IF_ERROR(operands.End());
  if (!args.in_order && args.epilogue.Any()) {
    return InvalidArgument(op, "an epilogue needs segments in order");
  }

  const int capability = ComputeCapability();
  if (args.planned) {
    if (!args.transpose_w && args.w.global_scale.column != 0) {
      return InvalidArgument(op,
                             "global_scale has a number for each column, but w is quantized "
                             "along N");
    }
    if (auto reason = qmm_sm90_unsupported(args, capability)) return Unimplemented(op, *reason);
    rules::QmmPlanSm90 plan;
    JGG_RETURN_IF_ERROR(BindPlan(op, plan_attrs, args.w.coding,
                                 {args.k, args.n, IsGated(activation), false, !args.transpose_w,
                                  args.dtype == DType::kF16, args.scaled ? 1 : 0},
                                 args.rows_x, args.rows_y, args.metadata, &plan));
    const bool floats = args.scaled && args.transpose_w && args.dtype == DType::kF32;
    if (floats != (plan.tile == rules::kFloatLinesTile)) {
      return InvalidArgument(op, "tiles of ", plan.tile, " rows are not those of x's dtype");
    }
    return FromCuda(op, qmm_sm90(stream, args, plan));
  }
  if (auto reason = qmm_sm80_unsupported(args, capability)) return Unimplemented(op, *reason);
  return FromCuda(op, qmm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(
    kQmm, Qmm,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // x
        .Arg<ffi::AnyBuffer>()  // weight
        .Arg<ffi::AnyBuffer>()  // scales
        .Arg<ffi::AnyBuffer>()  // metadata
        .RemainingArgs()        // x_sums, biases, global_scale, group_offset, bias, row_scale
        .Ret<ffi::AnyBuffer>()  // out
        .Attr<QuantizedAttrs>("quantized")
        .Attr<QmmAttrs>("qmm")
        .Attr<MetadataAttrs>("metadata")
        .Attr<EpilogueAttrs>("epilogue")
        .Attr<QmmPlanAttrs>("plan"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmm(XLA_FFI_CallFrame* call_frame) { return kQmm(call_frame); }

}  // namespace jgg

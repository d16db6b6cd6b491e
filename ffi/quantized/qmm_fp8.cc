// CUDA handler of qmm of mode "fp8" with weights as they are stored: bind, check, launch. Hopper
// only.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "quantized/qmm_bind.h"
#include "quantized/qmm_sm90.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "qmm_fp8";

// x has its columns in the order that gemm_sm90.h says.
static ffi::Error BindQmmFp8(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                             ffi::AnyBuffer out, BlockAttrs block, bool transpose_w,
                             QmmArgs* args) {
  QuantizedWeight& w = args->w;
  if (args->scaled) {
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "x", x, ffi::F32, "float32"));
  } else if (x.element_type() != ffi::F16) {
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "x", x, ffi::BF16, "bfloat16 or float16"));
  }
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "out", out.element_type()));
  JGG_RETURN_IF_ERROR(BindFp8Weight(kOp, weight, scales, block, 128, &w));
  const int64_t n = args->n = transpose_w ? w.lines : w.elements;
  const int64_t k = args->k = transpose_w ? w.elements : w.lines;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x",
                                 transpose_w ? "(T, K in whole 128)" : "(T, K in whole 64)", x,
                                 {-1, PaddedK(k, transpose_w)}));
  const bool gated = IsGated(args->epilogue.activation);
  if (gated && n % 2 != 0) return InvalidArgument(kOp, "a gated activation needs an even N");
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", out, {-1, gated ? n / 2 : n}));
  args->x = x.untyped_data();
  args->planned = args->in_order = true;
  args->transpose_w = transpose_w;
  args->out = out.untyped_data();
  args->dtype = *ToDType(x.element_type());
  args->out_dtype = *ToDType(out.element_type());
  args->rows_x = x.dimensions()[0];
  args->rows_y = out.dimensions()[0];
  return ffi::Error::Success();
}

static ffi::Error QmmFp8(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                         ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                         ffi::Result<ffi::AnyBuffer> out, BlockAttrs block,
                         MetadataAttrs metadata_attrs, EpilogueAttrs epilogue,
                         QmmPlanAttrs plan_attrs, bool transpose_w) {
  if (epilogue.existing_out) return InvalidArgument(kOp, "existing_out is not an operand of it");
  QmmArgs args{};
  JGG_RETURN_IF_ERROR(BindActivation(kOp, epilogue, &args.epilogue.activation));
  args.scaled =
      !transpose_w && plan_attrs.way == rules::kQmmWays[static_cast<int>(rules::QmmWay::kScaled)];
  JGG_RETURN_IF_ERROR(BindQmmFp8(x, weight, scales, *out, block, transpose_w, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &args.metadata));
  JGG_RETURN_IF_ERROR(
      CheckMm(kOp, args.metadata, args.rows_x, args.rows_y, args.w.groups, args.n, args.k));
  Operands operands(kOp, rest);
  if (metadata_attrs.group_offset)
    JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &args.metadata));
  JGG_RETURN_IF_ERROR(
      BindEpilogue(kOp, epilogue, args.w.groups, args.n, args.rows_y, &operands, &args.epilogue));
  JGG_RETURN_IF_ERROR(operands.End());
  if (auto reason = qmm_sm90_unsupported(args, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  rules::QmmPlanSm90 plan;
  JGG_RETURN_IF_ERROR(BindPlan(kOp, plan_attrs, args.w.coding,
                               {args.k, args.n, IsGated(args.epilogue.activation), false,
                                !transpose_w, args.dtype == DType::kF16, args.scaled ? 1 : 0},
                               args.rows_x, args.rows_y, args.metadata, &plan));
  return FromCuda(kOp, qmm_sm90(stream, args, plan));
}

XLA_FFI_DEFINE_HANDLER(kQmmFp8, QmmFp8,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // group_offset, bias, row_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<BlockAttrs>("block")
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<EpilogueAttrs>("epilogue")
                           .Attr<QmmPlanAttrs>("plan")
                           .Attr<bool>("transpose_w"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmmFp8(XLA_FFI_CallFrame* call_frame) { return kQmmFp8(call_frame); }

}  // namespace jgg

// CUDA handler of mm: bind, check the plan, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/existing_out.h"
#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/mm_sm100.h"
#include "grouped_mm/mm_sm80.h"
#include "grouped_mm/mm_sm90.h"
#include "grouped_mm/plan_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

// Optional operands after x, w and the metadata: group_offset, x_rows, y_rows, bias, row_scale,
// existing_out, in this order.
static ffi::Error BindOptions(cudaStream_t stream, ffi::RemainingArgs rest,
                              const MetadataAttrs& metadata, const RowsAttrs& rows,
                              const EpilogueAttrs& has, ffi::AnyBuffer out, MmArgs* args) {
  constexpr const char* op = "mm";
  Operands operands(op, rest);
  if (metadata.group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, &args->metadata));
  if (rows.x_rows)
    JGG_RETURN_IF_ERROR(BindRows(op, "x_rows", &operands, &args->x_list, &args->rows_x));
  if (rows.y_rows)
    JGG_RETURN_IF_ERROR(BindRows(op, "y_rows", &operands, &args->y_list, &args->rows_y));
  if (args->ByList() && args->metadata.kind != MetadataKind::kSegments &&
      args->rows_x != args->rows_y) {
    return InvalidArgument(op, "groups are of ", args->rows_x, " rows of x and ", args->rows_y,
                           " of the result, expected as many");
  }
  Epilogue& epilogue = args->epilogue;
  JGG_RETURN_IF_ERROR(
      BindEpilogue(op, has, args->groups, args->n, args->rows_y, &operands, &epilogue));
  if (has.existing_out) {
    JGG_RETURN_IF_ERROR(BindExistingOut(op, stream, &operands, out));
    epilogue.accumulate = true;
  }
  if (!args->in_order && epilogue.Any()) {
    return InvalidArgument(op, "an epilogue needs segments in order");
  }
  return operands.End();
}

// The second result, where there is one.
static ffi::Error BindPreactivation(const EpilogueAttrs& has, ffi::RemainingRets results,
                                    MmArgs* args) {
  constexpr const char* op = "mm";
  if (results.size() != (has.preactivation ? 1 : 0)) {
    return InvalidArgument(op, "has ", 1 + results.size(), " results");
  }
  Epilogue& epilogue = args->epilogue;
  epilogue.rounds_preactivation = has.rounds_preactivation;
  if (!has.preactivation) return ffi::Error::Success();
  auto result = results.get<ffi::AnyBuffer>(0);
  if (!result) return result.error();
  const ffi::AnyBuffer& buffer = **result;
  JGG_RETURN_IF_ERROR(CheckShape(op, "preactivation", "(T, N)", buffer, {args->rows_y, args->n}));
  if (ToDType(buffer.element_type()) != args->dtype) {
    return InvalidArgument(op, "preactivation has XLA dtype ",
                           static_cast<int>(buffer.element_type()), ", expected that of x");
  }
  epilogue.preactivation = buffer.untyped_data();
  return ffi::Error::Success();
}

static ffi::Error Mm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                     ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets results,
                     MetadataAttrs metadata_attrs, MmAttrs mm_attrs, RowsAttrs rows_attrs,
                     EpilogueAttrs epilogue_attrs, PlanAttrs plan) {
  const int planes = plan.planes;
  Activation activation = Activation::kNone;
  JGG_RETURN_IF_ERROR(BindActivation("mm", epilogue_attrs, &activation));
  MmArgs args;
  JGG_RETURN_IF_ERROR(CheckPlanes("mm", planes, x.element_type()));
  JGG_RETURN_IF_ERROR(BindMm({x, planes}, {w, planes}, *out, mm_attrs, activation, &args));
  JGG_RETURN_IF_ERROR(BindMetadata("mm", metadata_attrs, metadata, &args.metadata));
  args.metadata.clears_rest = mm_attrs.clears_rest;
  args.tf32 = plan.tf32;
  args.planes = planes;
  JGG_RETURN_IF_ERROR(BindPlan("mm", plan, &args.plan));
  JGG_RETURN_IF_ERROR(
      BindOptions(stream, rest, metadata_attrs, rows_attrs, epilogue_attrs, *out, &args));
  const bool sm100 = plan.kernel == "sm100";
  if (sm100) {
    JGG_RETURN_IF_ERROR(BindWorkspace("mm", results, &args.workspace, &args.workspace_bytes));
  } else {
    JGG_RETURN_IF_ERROR(BindPreactivation(epilogue_attrs, results, &args));
  }
  JGG_RETURN_IF_ERROR(
      CheckMm("mm", args.metadata, args.rows_x, args.rows_y, args.groups, args.n, args.k));
  const int capability = ComputeCapability();
  // Addresses that TMA does not take are for the generic kernel.
  if (sm100 && AlignedSm100({args.x, args.w, args.out})) {
    if (auto reason = mm_sm100_unsupported(args, capability)) return Unimplemented("mm", *reason);
    return FromCuda("mm", mm_sm100(stream, args));
  }
  const auto no_sm90 = mm_sm90_unsupported(args, capability);
  if (plan.kernel != "sm80" && !no_sm90) {
    if (auto reason = mm_sm90_plan_problem(args)) return InvalidArgument("mm", *reason);
    return FromCuda("mm", mm_sm90(stream, args));
  }
  if (args.ByList()) {
    return Unimplemented("mm",
                         "x_rows and y_rows need sm90: ", no_sm90.value_or("kernel is 'sm80'"));
  }
  if (planes > 1) return Unimplemented("mm", no_sm90.value_or("split operands need sm90"));
  if (args.epilogue.HasPreactivation()) {
    return Unimplemented("mm",
                         "a preactivation needs sm90: ", no_sm90.value_or("kernel is 'sm80'"));
  }
  if (auto reason = mm_sm80_unsupported(args, capability)) return Unimplemented("mm", *reason);
  return FromCuda("mm", mm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kMm, Mm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // w
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // BindOptions
                           .Ret<ffi::AnyBuffer>()  // out
                           .RemainingRets()        // BindPreactivation, BindWorkspace
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<MmAttrs>("mm")
                           .Attr<RowsAttrs>("rows")
                           .Attr<EpilogueAttrs>("epilogue")
                           .Attr<PlanAttrs>("plan"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMm(XLA_FFI_CallFrame* call_frame) { return kMm(call_frame); }

}  // namespace jgg

// CUDA handler of wgrad: bind, check the plan, launch.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/existing_out.h"
#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/plan_bind.h"
#include "grouped_mm/wgrad_bind.h"
#include "grouped_mm/wgrad_sm100.h"
#include "grouped_mm/wgrad_sm80.h"
#include "grouped_mm/wgrad_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Wgrad(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y,
                        ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets results,
                        MetadataAttrs metadata_attrs, WgradAttrs wgrad_attrs, RowsAttrs rows_attrs,
                        bool own_weight, WgradEpilogueAttrs epilogue, PlanAttrs plan) {
  constexpr const char* op = "wgrad";
  const int planes = plan.planes;
  WgradArgs args;
  JGG_RETURN_IF_ERROR(CheckPlanes(op, planes, x.element_type()));
  JGG_RETURN_IF_ERROR(BindWgrad({x, planes}, {y, planes}, *out, wgrad_attrs, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(op, metadata_attrs, metadata, &args.metadata));
  args.tf32 = plan.tf32;
  args.planes = planes;
  JGG_RETURN_IF_ERROR(BindPlan(op, plan, &args.plan));
  args.own_weight = own_weight;
  Operands operands(op, rest);
  if (metadata_attrs.group_offset) {
    JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, &args.metadata));
  } else if (own_weight && args.metadata.count != args.groups) {
    return InvalidArgument(op, "own_weight needs as many segments as weights, got ",
                           args.metadata.count, " and ", args.groups);
  }
  const bool segments = args.metadata.kind == MetadataKind::kSegments;
  if (rows_attrs.x_rows) {
    JGG_RETURN_IF_ERROR(BindRows(op, "x_rows", &operands, &args.x_list, &args.rows_x));
  }
  if (rows_attrs.y_rows) {
    JGG_RETURN_IF_ERROR(BindRows(op, "y_rows", &operands, &args.y_list, &args.rows_y));
  }
  JGG_RETURN_IF_ERROR(CheckSmall(op,
                                 {args.rows_x, args.rows_y, args.x_list.count, args.y_list.count,
                                  args.a, args.b, args.groups, args.metadata.count},
                                 0));
  // Kernels clamp sizes and spans to the rows of x. (Lines of planes are filled up, and are copied
  // by what knows where an operand ends.)
  if (!segments && planes == 1 && args.rows_x > args.rows_y) {
    return InvalidArgument(op, "groups are of ", args.rows_x, " rows of x, y has ", args.rows_y);
  }
  if (args.ByList() && (segments || args.rows_x != args.rows_y)) {
    return InvalidArgument(op, "rows by list need as many of x as of y, and no segments");
  }
  if (epilogue.scale) {
    const auto buffer = operands.Take("scale");
    if (!buffer) return buffer.error();
    JGG_RETURN_IF_ERROR(CheckPerGroup(op, "scale", *buffer, args.groups, ffi::F32, "float32"));
    args.scale = static_cast<const float*>(buffer->untyped_data());
  }
  if (epilogue.existing_out) {
    JGG_RETURN_IF_ERROR(BindExistingOut(op, stream, &operands, *out));
    args.accumulate = true;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  const bool sm100 = plan.kernel == "sm100";
  if (sm100) {
    JGG_RETURN_IF_ERROR(BindWorkspace(op, results, &args.workspace, &args.workspace_bytes));
  } else if (results.size() != 0) {
    return InvalidArgument(op, "has ", 1 + results.size(), " results");
  }
  const int capability = ComputeCapability();
  // Addresses that TMA does not take are for the generic kernel.
  if (sm100 && AlignedSm100({args.x, args.y, args.out})) {
    if (auto reason = wgrad_sm100_unsupported(args, capability)) return Unimplemented(op, *reason);
    return FromCuda(op, wgrad_sm100(stream, args));
  }
  const auto no_sm90 = wgrad_sm90_unsupported(args, capability);
  if (plan.kernel != "sm80" && !no_sm90) {
    if (auto reason = wgrad_sm90_plan_problem(args)) return InvalidArgument(op, *reason);
    return FromCuda(op, wgrad_sm90(stream, args));
  }
  if (planes > 1 || args.HasEpilogue() || args.ByList()) {
    const char* why = planes > 1      ? "split operands need sm90"
                      : args.ByList() ? "rows by list need sm90"
                                      : "an epilogue needs sm90";
    return Unimplemented(op, no_sm90.value_or(why));
  }
  if (auto reason = wgrad_sm80_unsupported(args, capability)) return Unimplemented(op, *reason);
  return FromCuda(op, wgrad_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kWgrad, Wgrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // y
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()  // group_offset, x_rows, y_rows, scale, existing_out
                           .Ret<ffi::AnyBuffer>()  // out
                           .RemainingRets()        // BindWorkspace
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<WgradAttrs>("wgrad")
                           .Attr<RowsAttrs>("rows")
                           .Attr<bool>("own_weight")  // segment s is for weight s, and no other
                           .Attr<WgradEpilogueAttrs>("epilogue")
                           .Attr<PlanAttrs>("plan"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggWgrad(XLA_FFI_CallFrame* call_frame) { return kWgrad(call_frame); }

}  // namespace jgg

// CUDA handler of mm: bind, choose, launch.

#include <string_view>

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/existing_out.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/mm_sm80.h"
#include "grouped_mm/mm_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

// Optional operands after x, w and the metadata, in this order.
struct MmOptions {
  bool group_offset, x_rows, y_rows, bias, row_scale, existing_out;
};

// The next operand as the rows of an operand that the rows of the product are, so many.
static ffi::Error BindRows(const char* name, Operands* operands, RowList* rows, int64_t* count) {
  constexpr const char* op = "mm";
  const auto list = operands->Take(name);
  if (!list) return list.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, name, "(T,)", *list, {-1}));
  if (list->element_type() != ffi::S32) {
    return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(list->element_type()),
                           ", expected int32");
  }
  rows->list = static_cast<const int32_t*>(list->untyped_data());
  *count = list->dimensions()[0];
  return ffi::Error::Success();
}

static ffi::Error BindOptions(cudaStream_t stream, ffi::RemainingArgs rest, const MmOptions& has,
                              ffi::AnyBuffer out, MmArgs* args) {
  constexpr const char* op = "mm";
  Operands operands(op, rest);
  if (has.group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, &args->metadata));
  if (has.x_rows) JGG_RETURN_IF_ERROR(BindRows("x_rows", &operands, &args->x_rows, &args->rows_x));
  if (has.y_rows) JGG_RETURN_IF_ERROR(BindRows("y_rows", &operands, &args->y_rows, &args->rows));
  if (args->ByList() && args->metadata.kind != MetadataKind::kSegments &&
      args->rows_x != args->rows) {
    return InvalidArgument(op, "groups are of ", args->rows_x, " rows of x and ", args->rows,
                           " of the result, expected as many");
  }
  Epilogue& epilogue = args->epilogue;
  if (has.bias) JGG_RETURN_IF_ERROR(BindBias(op, &operands, args->groups, args->n, &epilogue));
  if (has.row_scale) JGG_RETURN_IF_ERROR(BindRowScale(op, &operands, args->rows, &epilogue));
  if (has.existing_out) {
    JGG_RETURN_IF_ERROR(BindExistingOut(op, stream, &operands, out));
    epilogue.accumulate = true;
  }
  if (!args->in_order &&
      (has.bias || has.row_scale || has.existing_out || epilogue.activation != Activation::kNone)) {
    return InvalidArgument(op, "an epilogue needs segments in order");
  }
  return operands.End();
}

static ffi::Error Mm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                     ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> out, bool transpose_x, bool transpose_w,
                     bool transpose_out, bool tf32, std::string_view kind, bool swapped,
                     bool in_order, bool group_offset, bool bias, std::string_view activation,
                     bool row_scale, bool existing_out, std::string_view kernel, int32_t planes,
                     int32_t tile, bool x_rows, bool y_rows) {
  const auto known_activation = ToActivation(activation);
  if (!known_activation) return InvalidArgument("mm", "unknown activation '", activation, "'");
  MmArgs args;
  JGG_RETURN_IF_ERROR(CheckPlanes("mm", planes, x.element_type()));
  JGG_RETURN_IF_ERROR(BindMm({x, planes}, {w, planes}, *out, transpose_x, transpose_w,
                             transpose_out, *known_activation, &args));
  JGG_RETURN_IF_ERROR(BindMetadata("mm", kind, metadata, swapped, &args.metadata));
  args.tf32 = tf32;
  args.planes = planes;
  args.tile = tile;
  args.in_order = in_order;
  const MmOptions has{group_offset, x_rows, y_rows, bias, row_scale, existing_out};
  JGG_RETURN_IF_ERROR(BindOptions(stream, rest, has, *out, &args));
  JGG_RETURN_IF_ERROR(
      CheckMm("mm", args.metadata, args.rows_x, args.rows, args.groups, args.n, args.k));
  const int capability = ComputeCapability();
  const auto no_sm90 = mm_sm90_unsupported(args, capability);
  if (kernel != "sm80" && !no_sm90) return FromCuda("mm", mm_sm90(stream, args));
  if (args.ByList()) {
    return Unimplemented("mm",
                         "x_rows and y_rows need sm90: ", no_sm90.value_or("kernel is 'sm80'"));
  }
  if (planes > 1) return Unimplemented("mm", no_sm90.value_or("split operands need sm90"));
  if (auto reason = mm_sm80_unsupported(args, capability)) return Unimplemented("mm", *reason);
  return FromCuda("mm", mm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kMm, Mm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // w
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // MmOptions
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<bool>("transpose_x")
                           .Attr<bool>("transpose_w")
                           .Attr<bool>("transpose_out")
                           .Attr<bool>("tf32")
                           .Attr<std::string_view>("kind")
                           .Attr<bool>("swapped")
                           .Attr<bool>("in_order")
                           .Attr<bool>("group_offset")
                           .Attr<bool>("bias")
                           .Attr<std::string_view>("activation")
                           .Attr<bool>("row_scale")
                           .Attr<bool>("existing_out")
                           .Attr<std::string_view>("kernel")
                           .Attr<int32_t>("planes")
                           .Attr<int32_t>("tile")
                           .Attr<bool>("x_rows")
                           .Attr<bool>("y_rows"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMm(XLA_FFI_CallFrame* call_frame) { return kMm(call_frame); }

}  // namespace jgg

// CUDA handler of the backward pass in front of a mixture's down product. A list names the tokens
// whose cotangents are ct. d = ct @ w is the cotangent of row_scale * swiglu(h).
#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/mm_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "moe_down_backward";

static ffi::Error DownBackward(cudaStream_t stream, ffi::AnyBuffer ct, ffi::AnyBuffer w,
                               ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                               ffi::Result<ffi::AnyBuffer> activated,
                               ffi::Result<ffi::AnyBuffer> dh, ffi::Result<ffi::AnyBuffer> row_sums,
                               MetadataAttrs metadata_attrs, MmAttrs mm_attrs) {
  MmArgs args;
  JGG_RETURN_IF_ERROR(BindMm({ct, 1}, {w, 1}, *activated, mm_attrs, Activation::kNone, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &args.metadata));
  args.metadata.clears_rest = mm_attrs.clears_rest;
  Operands operands(kOp, rest);
  JGG_RETURN_IF_ERROR(BindRows(kOp, "tokens", &operands, &args.x_list, &args.rows_x));
  const auto h = operands.Take("h"), row_scale = operands.Take("row_scale");
  if (!h) return h.error();
  if (!row_scale) return row_scale.error();
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(
      CheckMm(kOp, args.metadata, args.rows_x, args.rows_y, args.groups, args.n, args.k));
  const int64_t rows = args.rows_y, columns = args.n;
  if (args.rows_x != rows) {
    return InvalidArgument(kOp, "tokens has ", args.rows_x, " rows, the result ", rows);
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "h", "(T, 2N)", *h, {rows, 2 * columns}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "dh", "(T, 2N)", *dh, {rows, 2 * columns}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "row_scale", "(T,)", *row_scale, {rows}));
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "row_sums", "(ceil(N / 16), T)", *row_sums, {(columns + 15) / 16, rows}));
  for (const ffi::AnyBuffer& buffer : {*h, *dh, *activated}) {
    if (buffer.element_type() != ct.element_type()) {
      return InvalidArgument(kOp, "h and the results must have the dtype of ct");
    }
  }
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "row_scale", *row_scale, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "row_sums", *row_sums, ffi::F32, "float32"));
  if (columns % 8 != 0) return InvalidArgument(kOp, "N must be a multiple of 8, got ", columns);
  if (auto reason = mm_sm90_unsupported(args, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  const DownBackwardArgs backward{h->untyped_data(), dh->untyped_data(),
                                  static_cast<const float*>(row_scale->untyped_data()),
                                  static_cast<float*>(row_sums->untyped_data())};
  return FromCuda(kOp, mm_backward_sm90(stream, args, backward));
}

XLA_FFI_DEFINE_HANDLER(kDownBackward, DownBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // ct, of tokens
                           .Arg<ffi::AnyBuffer>()  // w
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // tokens, h, row_scale
                           .Ret<ffi::AnyBuffer>()  // row_scale times the activation
                           .Ret<ffi::AnyBuffer>()  // dh
                           .Ret<ffi::AnyBuffer>()  // row_sums
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<MmAttrs>("mm"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeDownBackward(XLA_FFI_CallFrame* call_frame) {
  return kDownBackward(call_frame);
}

}  // namespace jgg

// CUDA handler of a product whose result is what an activation's cotangent is made of: bind,
// launch. The backward pass of activation(h) * row_scale and a product behind it, in one call.

#include <string_view>

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/mm_sm90.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "mm_activation_backward";

static ffi::Error MmActivationBackward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                                       ffi::AnyBuffer metadata, ffi::AnyBuffer h,
                                       ffi::AnyBuffer row_scale, ffi::Result<ffi::AnyBuffer> out,
                                       ffi::Result<ffi::AnyBuffer> dh,
                                       ffi::Result<ffi::AnyBuffer> row_sums,
                                       MetadataAttrs metadata_attrs, MmAttrs mm_attrs,
                                       std::string_view activation) {
  const auto known = ToActivation(activation);
  if (!known || !IsGated(*known)) {
    return InvalidArgument(kOp, "unknown gated activation '", activation, "'");
  }
  MmArgs args;
  JGG_RETURN_IF_ERROR(BindMm({x, 1}, {w, 1}, *out, mm_attrs, Activation::kNone, &args));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &args.metadata));
  JGG_RETURN_IF_ERROR(
      CheckMm(kOp, args.metadata, args.rows_x, args.rows_y, args.groups, args.n, args.k));
  const int64_t rows = args.rows_y, columns = args.n;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "h", "(T, 2N)", h, {rows, 2 * columns}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "dh", "(T, 2N)", *dh, {rows, 2 * columns}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "row_scale", "(T,)", row_scale, {rows}));
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "row_sums", "(ceil(N / 64), T)", *row_sums, {(columns + 63) / 64, rows}));
  for (const ffi::AnyBuffer& buffer : {h, *dh, *out}) {
    if (buffer.element_type() != x.element_type()) {
      return InvalidArgument(kOp, "h and the results must have the dtype of x");
    }
  }
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "row_scale", row_scale, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "row_sums", *row_sums, ffi::F32, "float32"));
  if (columns % 8 != 0) return InvalidArgument(kOp, "N must be a multiple of 8, got ", columns);
  args.backward = {*known, h.untyped_data(), static_cast<const float*>(row_scale.untyped_data()),
                   dh->untyped_data(), static_cast<float*>(row_sums->untyped_data())};
  if (auto reason = mm_sm90_unsupported(args, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, mm_sm90(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kMmActivationBackward, MmActivationBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // w
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // row_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // dh
                           .Ret<ffi::AnyBuffer>()  // row_sums
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<MmAttrs>("mm")
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMmActivationBackward(XLA_FFI_CallFrame* call_frame) {
  return kMmActivationBackward(call_frame);
}

}  // namespace jgg

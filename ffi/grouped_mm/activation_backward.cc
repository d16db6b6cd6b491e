// CUDA handler of an activation's backward pass: bind, check, launch.
#include "grouped_mm/activation_backward.h"

#include <string_view>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "common/error.h"
#include "grouped_mm/mm_bind.h"
#include "grouped_mm/rules.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "activation_backward";

// A result of the operation, of h's dtype or float32.
static ffi::ErrorOr<void*> BindResult(ffi::RemainingRets results, size_t index, const char* name,
                                      ffi::DataType dtype, std::initializer_list<int64_t> shape) {
  auto result = results.get<ffi::AnyBuffer>(index);
  if (!result) return ffi::Unexpected(result.error());
  const ffi::AnyBuffer& buffer = **result;
  if (ffi::Error error = CheckShape(kOp, name, "its", buffer, shape); error.failure()) {
    return ffi::Unexpected(std::move(error));
  }
  if (buffer.element_type() != dtype) {
    return ffi::Unexpected(
        InvalidArgument(kOp, name, " has XLA dtype ", static_cast<int>(buffer.element_type())));
  }
  return buffer.untyped_data();
}

static ffi::Error BackwardOf(cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer d,
                             ffi::RemainingArgs rest, ffi::RemainingRets results,
                             std::string_view activation) {
  const auto known = ToActivation(activation);
  if (!known || *known == Activation::kNone) {
    return InvalidArgument(kOp, "unknown activation '", activation, "'");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "h", "(T, N)", h, {-1, -1}));
  const int64_t rows = h.dimensions()[0], n = h.dimensions()[1];
  const int64_t columns = IsGated(*known) ? n / 2 : n;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "d", "(T, N)", d, {rows, columns}));
  const auto dtype = ToDType(h.element_type());
  if (!dtype || *dtype == DType::kF32 || d.element_type() != h.element_type()) {
    return InvalidArgument(kOp, "h and d must be bfloat16 or float16 alike");
  }
  if (IsGated(*known) && n % 2 != 0) {
    return InvalidArgument(kOp, "h must have an even number of columns, got ", n);
  }
  if (auto reason = rules::ActivationBackwardProblem(columns)) return Unimplemented(kOp, *reason);
  ActivationBackwardArgs args{};
  args.activation = *known;
  args.dtype = *dtype;
  args.h = h.untyped_data();
  args.d = d.untyped_data();
  args.rows = rows;
  args.n = n;
  args.columns = columns;
  Operands operands(kOp, rest);
  const bool scaled = rest.size() > 0;
  if (scaled) {
    const auto scale = operands.Take("row_scale");
    if (!scale) return scale.error();
    JGG_RETURN_IF_ERROR(CheckShape(kOp, "row_scale", "(T,)", *scale, {rows}));
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "row_scale", *scale, ffi::F32, "float32"));
    args.row_scale = static_cast<const float*>(scale->untyped_data());
  }
  if (rest.size() > 1) {
    const auto live = operands.Take("live_rows");
    if (!live) return live.error();
    JGG_RETURN_IF_ERROR(CheckShape(kOp, "live_rows", "()", *live, {}));
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "live_rows", *live, ffi::S32, "int32"));
    args.live_rows = static_cast<const int32_t*>(live->untyped_data());
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (results.size() != (scaled ? 3 : 1)) {
    return InvalidArgument(kOp, "has ", results.size(), " results, expected ", scaled ? 3 : 1);
  }
  const auto dh = BindResult(results, 0, "dh", h.element_type(), {rows, n});
  if (!dh) return dh.error();
  args.dh = *dh;
  if (scaled) {
    const auto activated = BindResult(results, 1, "activated", h.element_type(), {rows, columns});
    if (!activated) return activated.error();
    const auto sums = BindResult(results, 2, "row_sums", ffi::F32, {rows});
    if (!sums) return sums.error();
    args.activated = *activated;
    args.row_sums = static_cast<float*>(*sums);
  }
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, ActivationBackward(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kActivationBackward, BackwardOf,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // d
                           .RemainingArgs()        // row_scale, live_rows
                           .RemainingRets()        // dh, and with row_scale activated, row_sums
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggActivationBackward(XLA_FFI_CallFrame* call_frame) {
  return kActivationBackward(call_frame);
}

}  // namespace jgg

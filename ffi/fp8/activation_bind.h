// What the handlers of FP8's gated activations have in common.
#pragma once

#include <string_view>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/activation_sm80.h"
#include "fp8/codes_bind.h"
#include "fp8/rules.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// h (R, 2F), sizes (G,), and a workspace, which has room for tiles of padded rows where blocks lie
// along rows.
inline xla::ffi::Error BindActivation(const char* op, std::string_view activation,
                                      const xla::ffi::AnyBuffer& h,
                                      const xla::ffi::AnyBuffer& sizes,
                                      const xla::ffi::AnyBuffer& workspace, bool along_rows,
                                      Fp8ActivationSm80* args) {
  namespace ffi = xla::ffi;
  const auto known = ToActivation(activation);
  if (!known || !IsGated(*known)) {
    return InvalidArgument(op, "activation '", activation, "' is not gated");
  }
  JGG_RETURN_IF_ERROR(CheckDtype(op, "h", h, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "h", "(R, 2F)", h, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sizes", sizes, ffi::S32, "int32"));
  args->activation = *known;
  args->rows = h.dimensions()[0];
  args->columns = h.dimensions()[1] / 2;
  args->groups = sizes.dimensions()[0];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {args->rows, 2 * args->columns, args->groups}));
  if (h.dimensions()[1] % 2 != 0) {
    return InvalidArgument(op, "h must have an even number of columns, got ", ShapeText(h));
  }
  if (auto reason = rules::Fp8ActivationProblem(args->columns, along_rows)) {
    return Unimplemented(op, *reason);
  }
  const int64_t tiles = along_rows ? Fp8PaddedRows(args->rows, args->groups) / 128 : 0;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "workspace", workspace, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "workspace", "(words,)", workspace, {Fp8GroupsWords(args->groups, tiles)}));
  args->h = h.untyped_data();
  args->sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args->workspace = workspace.untyped_data();
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return ffi::Error::Success();
}

// The other operands of a backward pass, of which BindActivation has bound `args->of`: d (R, F) and
// row_scale (R,); and how long its results along rows are.
template <typename Args>
xla::ffi::Error BindActivationBackward(const char* op, const xla::ffi::AnyBuffer& d,
                                       const xla::ffi::AnyBuffer& row_scale, Args* args) {
  namespace ffi = xla::ffi;
  const int64_t rows = args->of.rows;
  args->along = Fp8PaddedRows(rows, args->of.groups);
  JGG_RETURN_IF_ERROR(CheckSmall(op, {args->along}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "d", d, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "d", "(R, F)", d, {rows, args->of.columns}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "row_scale", row_scale, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "row_scale", "(R,)", row_scale, {rows}));
  args->d = d.untyped_data();
  args->row_scale = static_cast<const float*>(row_scale.untyped_data());
  return ffi::Error::Success();
}

// Its sums of d * activation(h) over 128 columns.
template <typename Args>
xla::ffi::Error BindActivationSums(const char* op, const xla::ffi::AnyBuffer& sums, Args* args) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sums", sums, xla::ffi::F32, "float32"));
  args->sums = static_cast<float*>(sums.untyped_data());
  return CheckShape(op, "sums", "(F / 128, R)", sums, {args->of.columns / 128, args->of.rows});
}

}  // namespace jgg

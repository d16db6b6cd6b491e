// From XLA's buffers to WgradArgs, for the handlers of wgrad.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/wgrad.h"

namespace jgg {

// Check a call's matrices and describe them.
inline xla::ffi::Error BindWgrad(const PlanesBuffer& x, const PlanesBuffer& y,
                                 xla::ffi::AnyBuffer out, const WgradAttrs& attrs,
                                 WgradArgs* args) {
  constexpr const char* op = "wgrad";
  const auto [transpose_x, transpose_y] = attrs;
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out.element_type()));
  if (y.element_type() != x.element_type()) {
    return InvalidArgument(op, "x and y must have one dtype");
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", transpose_x ? "(A, T)" : "(T, A)", x, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "y", transpose_y ? "(B, T)" : "(T, B)", y, {-1, -1}));
  const int64_t a = x.dimensions()[transpose_x ? 0 : 1];
  const int64_t b = y.dimensions()[transpose_y ? 0 : 1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(G, A, B)", out, {-1, a, b}));

  *args = WgradArgs{};
  args->x = x.untyped_data();
  args->y = y.untyped_data();
  args->out = out.untyped_data();
  args->dtype = *ToDType(x.element_type());
  args->out_dtype = *ToDType(out.element_type());
  args->rows_x = x.dimensions()[transpose_x ? 1 : 0];
  args->rows_y = y.dimensions()[transpose_y ? 1 : 0];
  args->x_list.count = args->rows_x;
  args->y_list.count = args->rows_y;
  args->a = a;
  args->b = b;
  args->groups = out.dimensions()[0];
  args->strides.x_row = transpose_x ? 1 : a;
  args->strides.x_a = transpose_x ? args->rows_x : 1;
  args->strides.y_row = transpose_y ? 1 : b;
  args->strides.y_b = transpose_y ? args->rows_y : 1;

  return xla::ffi::Error::Success();
}

}  // namespace jgg

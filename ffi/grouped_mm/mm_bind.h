// From XLA's buffers to MmArgs, for the handlers of mm.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm.h"

namespace jgg {

// Check a call's matrices and describe them.
inline xla::ffi::Error BindMm(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer w, xla::ffi::AnyBuffer out,
                              bool transpose_x, bool transpose_w, bool transpose_out,
                              Activation activation, MmArgs* args) {
  constexpr const char* op = "mm";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out.element_type()));
  if (w.element_type() != x.element_type()) {
    return InvalidArgument(op, "x and w must have one dtype");
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", transpose_x ? "(K, T)" : "(T, K)", x, {-1, -1}));
  const int64_t rows_x = x.dimensions()[transpose_x ? 1 : 0];
  const int64_t k = x.dimensions()[transpose_x ? 0 : 1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "w", transpose_w ? "(G, N, K)" : "(G, K, N)", w,
                                 {-1, transpose_w ? -1 : k, transpose_w ? k : -1}));
  const int64_t n = w.dimensions()[transpose_w ? 1 : 2];
  const int64_t columns = IsGated(activation) ? n / 2 : n;
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", transpose_out ? "(N, T)" : "(T, N)", out,
                                 {transpose_out ? columns : -1, transpose_out ? -1 : columns}));
  const int64_t rows = out.dimensions()[transpose_out ? 1 : 0];

  *args = MmArgs{};
  args->x = x.untyped_data();
  args->w = w.untyped_data();
  args->out = out.untyped_data();
  args->dtype = *ToDType(x.element_type());
  args->out_dtype = *ToDType(out.element_type());
  args->rows_x = rows_x;
  args->rows = rows;
  args->k = k;
  args->n = n;
  args->groups = w.dimensions()[0];
  args->x_row = transpose_x ? 1 : k;
  args->x_k = transpose_x ? rows_x : 1;
  args->w_group = k * n;
  args->w_k = transpose_w ? 1 : n;
  args->w_n = transpose_w ? k : 1;
  args->out_row = transpose_out ? 1 : columns;
  args->out_n = transpose_out ? rows : 1;
  args->epilogue.activation = activation;
  return xla::ffi::Error::Success();
}

}  // namespace jgg

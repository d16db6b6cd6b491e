// From XLA's buffers to MmArgs, for the handlers of mm.
#pragma once

#include <string_view>

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm.h"

namespace jgg {

// Check a call's matrices and describe them.
inline xla::ffi::Error BindMm(const PlanesBuffer& x, const PlanesBuffer& w, xla::ffi::AnyBuffer out,
                              const MmAttrs& attrs, Activation activation, MmArgs* args) {
  constexpr const char* op = "mm";
  [[maybe_unused]] const auto [transpose_x, transpose_w, transpose_out, in_order, clears_rest] =
      attrs;
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
  args->rows_y = rows;
  args->x_list.count = rows_x;
  args->y_list.count = rows;
  args->k = k;
  args->n = n;
  args->groups = w.dimensions()[0];
  args->strides.x_row = transpose_x ? 1 : k;
  args->strides.x_k = transpose_x ? rows_x : 1;
  args->strides.w_group = k * n;
  args->strides.w_k = transpose_w ? 1 : n;
  args->strides.w_n = transpose_w ? k : 1;
  args->strides.out_row = transpose_out ? 1 : columns;
  args->strides.out_n = transpose_out ? rows : 1;
  args->in_order = in_order;
  args->epilogue.activation = activation;
  return xla::ffi::Error::Success();
}

inline xla::ffi::Error BindActivation(const char* op, const EpilogueAttrs& attrs,
                                      Activation* activation) {
  const auto known = ToActivation(attrs.activation);
  if (!known) return InvalidArgument(op, "unknown activation '", attrs.activation, "'");
  if (op != std::string_view("mm") && (attrs.preactivation || attrs.rounds_preactivation)) {
    return InvalidArgument(op, "has no preactivation");
  }
  *activation = *known;
  return xla::ffi::Error::Success();
}

// The next operand as an epilogue's bias, or row scale.
inline xla::ffi::Error BindBias(const char* op, Operands* operands, int64_t groups, int64_t n,
                                Epilogue* epilogue) {
  const auto bias = operands->Take("bias");
  if (!bias) return bias.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, "bias", "(G, N)", *bias, {groups, n}));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "bias", bias->element_type()));
  epilogue->bias = bias->untyped_data();
  epilogue->bias_dtype = *ToDType(bias->element_type());
  return xla::ffi::Error::Success();
}

inline xla::ffi::Error BindRowScale(const char* op, Operands* operands, int64_t rows,
                                    Epilogue* epilogue) {
  const auto row_scale = operands->Take("row_scale");
  if (!row_scale) return row_scale.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, "row_scale", "(T,)", *row_scale, {rows}));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "row_scale", row_scale->element_type()));
  epilogue->row_scale = row_scale->untyped_data();
  epilogue->row_scale_dtype = *ToDType(row_scale->element_type());
  return xla::ffi::Error::Success();
}

// The next operands as the bias and the row scale that an epilogue has.
inline xla::ffi::Error BindEpilogue(const char* op, const EpilogueAttrs& has, int64_t groups,
                                    int64_t n, int64_t rows, Operands* operands,
                                    Epilogue* epilogue) {
  if (has.bias) JGG_RETURN_IF_ERROR(BindBias(op, operands, groups, n, epilogue));
  if (has.row_scale) JGG_RETURN_IF_ERROR(BindRowScale(op, operands, rows, epilogue));
  return xla::ffi::Error::Success();
}

}  // namespace jgg

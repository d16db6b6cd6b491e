// From XLA's buffers to QmmArgs, for the handlers of qmm.
#pragma once

#include <optional>
#include <string_view>

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/metadata_bind.h"
#include "quantized/attributes.h"
#include "quantized/plan.h"
#include "quantized/qmm.h"
#include "quantized/rules.h"

namespace jgg {

// Check that there is such a coding, in this layout. Layout "sm90" has biases among the scales.
inline xla::ffi::Error BindCoding(const char* op, const QuantizedAttrs& attrs,
                                  std::string_view layout, QuantizedWeight* w) {
  const auto [mode, bits, group_size, its_layout, biases, global_scale] = attrs;
  if (its_layout != layout) {
    return InvalidArgument(op, "layout '", its_layout, "' is not '", layout, "'");
  }
  const FormatFacts* facts = rules::FindMode(mode);
  if (facts == nullptr) return InvalidArgument(op, rules::UnknownMode(mode));
  bool known = false;
  for (const FormatFacts& format : kFormats) {
    known |=
        format.mode == facts->mode && format.bits == bits && format.takes_group_size(group_size);
  }
  if (!known) {
    return InvalidArgument(op, "mode '", mode, "' has no bits=", bits, ", group_size=", group_size);
  }
  if (!facts->is_linear && layout == "linear") {
    return InvalidArgument(op, "mode '", mode, "' has no kernel in layout '", layout, "'");
  }
  const bool has_biases = facts->scale == ScaleType::kScaleAndBias && layout == "linear";
  if (biases != has_biases) {
    return InvalidArgument(op, "mode '", mode, "' ", biases ? "has no biases" : "needs biases");
  }
  if (global_scale && !facts->takes_global_scale) {
    const auto takes = [](const FormatFacts& format) { return format.takes_global_scale; };
    return InvalidArgument(op, "global_scale is for mode '", rules::NamesOf("' or '", takes),
                           "', not '", mode, "'");
  }
  w->coding.mode = facts->mode;
  w->coding.bits = bits;
  w->group_size = group_size;
  return xla::ffi::Error::Success();
}

// The plan that a call carries, if there is such a kernel.
inline xla::ffi::Error BindPlan(const char* op, const QmmPlanAttrs& attrs, const Coding& coding,
                                const rules::QmmSizes& sizes, int64_t rows_x, int64_t rows,
                                const Metadata& metadata, rules::QmmPlanSm90* plan) {
  const auto way = rules::FindName<rules::QmmWay>(rules::kQmmWays, attrs.way);
  if (!way) return InvalidArgument(op, "unknown plan '", attrs.way, "'");
  *plan = {*way, attrs.tile, attrs.parts, attrs.pairs};
  const rules::QmmRows of{rows_x, rows, metadata.count, metadata.kind == MetadataKind::kSizes,
                          metadata.offset != nullptr};
  const FormatFacts& format = FactsOf(coding.mode, coding.bits);
  if (auto reason = rules::PlanQmmProblem(*plan, format, sizes, of)) {
    return InvalidArgument(op, *reason);
  }
  return xla::ffi::Error::Success();
}

// Check x, the weight and its scales, and the result, and describe them. `args->w` has its coding.
inline xla::ffi::Error BindQmm(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer weight,
                               xla::ffi::AnyBuffer scales, xla::ffi::AnyBuffer out,
                               const QmmAttrs& attrs, Activation activation, QmmArgs* args) {
  constexpr const char* op = "qmm";
  const auto [transpose_w, planned, in_order, tf32] = attrs;
  QuantizedWeight& w = args->w;
  const int64_t bits = w.coding.bits, group_size = w.group_size;
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, K)", x, {-1, -1}));
  int64_t k = x.dimensions()[1];
  if (weight.element_type() != xla::ffi::U32) {
    return InvalidArgument(op, "weight has XLA dtype ", static_cast<int>(weight.element_type()),
                           ", expected uint32");
  }
  if (planned) {
    JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(G, lines, words)", weight, {-1, -1, -1}));
    k = transpose_w ? weight.dimensions()[2] * 32 / bits : weight.dimensions()[1];
    if (transpose_w && x.element_type() == xla::ffi::F32) {
      JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, K)", x, {-1, k}));
    } else {
      JGG_RETURN_IF_ERROR(CheckShape(op, "x",
                                     transpose_w ? "(T, K in whole 128)" : "(T, K in whole 64)", x,
                                     {-1, PaddedK(k, transpose_w)}));
    }
  }
  if (transpose_w) {
    if (k % group_size != 0) {
      return InvalidArgument(op, "K=", k, " is not a multiple of group_size=", group_size);
    }
    JGG_RETURN_IF_ERROR(
        CheckShape(op, "weight", "(G, N, K*bits/32)", weight, {-1, -1, k * bits / 32}));
  } else {
    JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(G, K, N*bits/32)", weight, {-1, k, -1}));
    if (weight.dimensions()[2] * 32 % (bits * group_size) != 0) {
      return InvalidArgument(op, "weight has shape ", ShapeText(weight),
                             ", expected (G, K, N*bits/32) with N a multiple of group_size=",
                             group_size, " and bits=", bits);
    }
  }
  w.groups = weight.dimensions()[0];
  w.lines = weight.dimensions()[1];
  w.elements = weight.dimensions()[2] * 32 / bits;
  JGG_RETURN_IF_ERROR(CheckShape(op, "scales",
                                 transpose_w ? "(G, N, K/group_size)" : "(G, K, N/group_size)",
                                 scales, {w.groups, w.lines, w.elements / group_size}));
  if (w.coding.HasFloatScales()) {
    JGG_RETURN_IF_ERROR(CheckFloat(op, "scales", scales.element_type()));
    w.coding.scale_dtype = *ToDType(scales.element_type());
  } else if (scales.element_type() != xla::ffi::U8) {
    return InvalidArgument(op, "scales has XLA dtype ", static_cast<int>(scales.element_type()),
                           ", expected uint8");
  }
  const int64_t n = transpose_w ? w.lines : w.elements;
  const bool gated = IsGated(activation);
  if (gated && n % 2 != 0)
    return InvalidArgument(op, "a gated activation needs an even N, got ", n);
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(T, N)", out, {-1, gated ? n / 2 : n}));
  w.packed = weight.untyped_data();
  w.scales = scales.untyped_data();
  args->x = x.untyped_data();
  args->planned = planned;
  args->transpose_w = transpose_w;
  args->out = out.untyped_data();
  args->dtype = *ToDType(x.element_type());
  args->out_dtype = *ToDType(out.element_type());
  args->rows_x = x.dimensions()[0];
  args->rows_y = out.dimensions()[0];
  args->k = k;
  args->n = n;
  args->in_order = in_order;
  args->tf32 = tf32;
  args->epilogue.activation = activation;
  return xla::ffi::Error::Success();
}

// Check a weight of mode "fp8" as it is stored and its scales, and describe them: lines are N, or K
// where it is quantized along N. A block has whole `unit` codes of a line, or all.
inline xla::ffi::Error BindFp8Weight(const char* op, xla::ffi::AnyBuffer weight,
                                     xla::ffi::AnyBuffer scales, BlockAttrs block, int64_t unit,
                                     QuantizedWeight* w) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, "weight", weight, xla::ffi::F8E4M3FN, "float8_e4m3fn"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "scales", scales, xla::ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(G, lines, codes)", weight, {-1, -1, -1}));
  w->coding = {Mode::kFp8, 8, DType::kF32};
  w->groups = weight.dimensions()[0];
  w->lines = weight.dimensions()[1];
  w->elements = weight.dimensions()[2];
  if (block.rows < 1 || block.columns < 1 ||
      (block.columns % unit != 0 && block.columns < w->elements)) {
    return InvalidArgument(op, "a block of ", block.rows, " x ", block.columns, " has no whole ",
                           unit, " columns or all");
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "scales", "(G, blocks of lines, blocks of a line)", scales,
                                 {w->groups, (w->lines + block.rows - 1) / block.rows,
                                  (w->elements + block.columns - 1) / block.columns}));
  w->group_size = block.columns;
  w->lines_each = block.rows;
  w->packed = weight.untyped_data();
  w->scales = scales.untyped_data();
  return xla::ffi::Error::Success();
}

// The next operand as biases, which are shaped like the scales.
inline xla::ffi::Error BindBiases(const char* op, xla::ffi::AnyBuffer scales, Operands* operands,
                                  QuantizedWeight* w) {
  const auto biases = operands->Take("biases");
  if (!biases) return biases.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, "biases", "the shape of scales", *biases,
                                 {w->groups, w->lines, w->elements / w->group_size}));
  if (biases->element_type() != scales.element_type()) {
    return InvalidArgument(op, "biases and scales must have one dtype");
  }
  w->biases = biases->untyped_data();
  return xla::ffi::Error::Success();
}

// The next operand as sums of x: four for each row and 128 k, or 64.
inline xla::ffi::Error BindXSums(const char* op, int64_t rows, int64_t fours, Operands* operands,
                                 const void** x_sums) {
  const auto found = operands->Take("x_sums");
  if (found.has_error()) return found.error();
  const xla::ffi::AnyBuffer& sums = *found;
  if (sums.element_type() != xla::ffi::F32) return InvalidArgument(op, "x_sums must be float32");
  JGG_RETURN_IF_ERROR(CheckShape(op, "x_sums", "(K / 128 or 64, T, 4)", sums, {fours, rows, 4}));
  if (reinterpret_cast<uintptr_t>(sums.untyped_data()) % 16 != 0) {
    return Unimplemented(op, "x_sums must be 16-byte aligned");
  }
  *x_sums = sums.untyped_data();
  return xla::ffi::Error::Success();
}

// The next operand as the global scale: a float32 scalar, one per group or per group and column.
inline xla::ffi::Error BindGlobalScale(const char* op, int64_t groups, int64_t n,
                                       Operands* operands, GlobalScale* global_scale) {
  const auto scale = operands->Take("global_scale");
  if (!scale) return scale.error();
  if (scale->element_type() != xla::ffi::F32) {
    return InvalidArgument(op, "global_scale has XLA dtype ",
                           static_cast<int>(scale->element_type()), ", expected float32");
  }
  const size_t rank = scale->dimensions().size();
  if (rank == 1) {
    JGG_RETURN_IF_ERROR(CheckShape(op, "global_scale", "(G,)", *scale, {groups}));
  } else if (rank != 0) {
    JGG_RETURN_IF_ERROR(CheckShape(op, "global_scale", "(G, N)", *scale, {groups, n}));
  }
  *global_scale = {static_cast<const float*>(scale->untyped_data()),
                   rank == 0   ? 0
                   : rank == 1 ? 1
                               : n,
                   rank == 2};
  return xla::ffi::Error::Success();
}

}  // namespace jgg

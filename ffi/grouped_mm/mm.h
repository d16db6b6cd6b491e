// mm: out[y_start_s + i, n] += sum_k x[x_start_s + i, k] * w[weight_s, k, n]; T (rows) is grouped.
// Rows of the result that no segment reaches are zeros.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "grouped_mm/activations.h"
#include "grouped_mm/plan.h"
#include "grouped_mm/segments.h"

namespace jgg {

// The activation whose backward pass a Hopper kernel makes of a product's sums: see by_list_sm90.h.
inline constexpr Activation kBackwardSm90 = Activation::kSwiglu;

// A row's float32 sums y become, before they are rounded:
//   existing_out + row_scale * activation(y + bias[weight])
// Rows that no segment reaches keep existing_out, or are zeros.
struct Epilogue {
  const void* bias = nullptr;       // (G, N)
  const void* row_scale = nullptr;  // (T,)
  DType bias_dtype = DType::kF32;
  DType row_scale_dtype = DType::kF32;
  bool accumulate = false;  // `out` already holds existing_out
  Activation activation = Activation::kNone;
  // The sums with their bias, (T, N), are a second result, in the operands' dtype; and the
  // activation may be of those, as they are rounded. sm90 has both for gated activations.
  void* preactivation = nullptr;
  bool rounds_preactivation = false;

  constexpr bool Any() const {
    return bias != nullptr || row_scale != nullptr || accumulate || activation != Activation::kNone;
  }
  constexpr bool HasPreactivation() const {
    return preactivation != nullptr || rounds_preactivation;
  }
  // Whether it has a bias and scales at most.
  constexpr bool Linear() const { return !accumulate && activation == Activation::kNone; }
};

// Rows by list: row t of the product is row list[t] of an operand that has `count` rows. Outside of
// [0, count): of x, a row of zeros, whatever the weight holds; of the result, one that is not
// stored. Rows of the result are named at most once, and those that are not named are not written.
struct RowList {
  const int32_t* list = nullptr;  // null: row t
  int64_t count = 0;
};

struct MmArgs {
  const void* x;
  const void* w;
  void* out;
  DType dtype;             // of x and w
  DType out_dtype;         // of out
  bool tf32;               // float32 operands may be rounded to TensorFloat-32
  rules::PlanSm90 plan;    // of sm90
  int planes = 1;          // float32 operands may come as bf16 planes, one after another in a line
  int64_t rows_x, rows_y;  // of x and the result, as segments count them: those of a list, if any
  int64_t k, n, groups;
  // Elements from one index to the next; this is how transposed operands are told apart.
  struct Strides {
    int64_t x_row, x_k, w_group, w_k, w_n, out_row, out_n;
  } strides;
  Metadata metadata;
  bool in_order;  // the segments' rows in the result are ascending and disjoint
  RowList x_list, y_list;
  Epilogue epilogue;
  void* workspace = nullptr;  // of sm100
  int64_t workspace_bytes = 0;

  bool ByList() const { return x_list.list != nullptr || y_list.list != nullptr; }
};

}  // namespace jgg

// wgrad: out[weight_s, a, b] += sum_i x[x_start_s + i, a] * y[y_start_s + i, b]; T (contracted) is
// grouped. Matrices that no segment names are zeros.
//
// A row of x or of y may come by list: row t is its row list[t], and zeros where it has none. sm90
// has that of one of them.
//
// sm90 also does out[g] = scale[g] * sums[g] + existing_out[g], where a matrix without rows keeps
// existing_out as it is. Others' subnormal numbers may count as zeros.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "grouped_mm/mm.h"
#include "grouped_mm/plan.h"
#include "grouped_mm/segments.h"

namespace jgg {

struct WgradArgs {
  const void* x;
  const void* y;
  void* out;
  DType dtype;             // of x and y
  DType out_dtype;         // of out
  bool tf32;               // float32 operands may be rounded to TensorFloat-32
  rules::PlanSm90 plan;    // of sm90
  int planes = 1;          // float32 operands may come as bf16 planes, one after another in a line
  int64_t rows_x, rows_y;  // as segments count them: those of a list, if any
  int64_t a, b, groups;
  // Elements from one index to the next; this is how transposed operands are told apart.
  struct Strides {
    int64_t x_row, x_a, y_row, y_b;
  } strides;
  Metadata metadata;
  bool own_weight;  // segment s names weight s, and there are as many segments as weights
  const float* scale = nullptr;  // (G,), or null: 1
  bool accumulate = false;       // `out` already holds existing_out

  RowList x_list, y_list;
  void* workspace = nullptr;  // of sm100
  int64_t workspace_bytes = 0;

  bool ByList() const { return x_list.list != nullptr || y_list.list != nullptr; }
  bool HasEpilogue() const { return scale != nullptr || accumulate; }
};

}  // namespace jgg

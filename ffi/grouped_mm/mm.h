// mm: out[y_start_s + i, n] += sum_k x[x_start_s + i, k] * w[weight_s, k, n]; T (rows) is grouped.
// Rows of the result that no segment reaches are zeros.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "grouped_mm/segments.h"

namespace jgg {

struct MmArgs {
  const void* x;
  const void* w;
  const Segment* segments;
  void* out;
  DType dtype;      // of x and w
  DType out_dtype;  // of out
  int64_t rows_x, rows, k, n, groups, num_segments;
  // Elements from one index to the next; this is how transposed operands are told apart.
  int64_t x_row, x_k, w_group, w_k, w_n, out_row, out_n;
};

}  // namespace jgg

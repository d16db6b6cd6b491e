// qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]; T (rows) is grouped. W is a quantized
// weight, dequantized exactly and rounded once to x's dtype. Rows of the result that no segment
// reaches are zeros.
#pragma once

#include <cstdint>

#include "grouped_mm/mm.h"
#include "quantized/quantized.h"

namespace jgg {

struct QmmArgs {
  const void* x;   // (T, K)
  bool x_ordered;  // x is (T, K in whole 128), for the Hopper kernel: see gemm_sm90.h
  QuantizedWeight w;
  bool transpose_w;  // w's lines are the columns of W, not its rows
  void* out;         // (T, N)
  DType dtype;       // of x
  DType out_dtype;
  bool tf32;               // float32 operands may be rounded to TensorFloat-32
  int64_t rows_x, rows_y;  // of x and the result
  int64_t k, n;
  Metadata metadata;
  bool in_order;      // the segments' rows in the result are ascending and disjoint
  Epilogue epilogue;  // of the sums times w's global scale
};

}  // namespace jgg

// qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]; T (rows) is grouped. W is a quantized
// weight, dequantized exactly and rounded once to x's dtype. Rows of the result that no segment
// reaches are zeros.
#pragma once

#include <cstdint>

#include "grouped_mm/mm.h"
#include "quantized/quantized.h"

namespace jgg {

struct QmmArgs {
  const void* x;  // (T, K)
  // For the Hopper kernel: x is (T, K in whole 128), in the order that gemm_sm90.h says; or, where
  // w is quantized along N, (T, K in whole 64) as it is.
  bool planned;
  QuantizedWeight w;
  // ... and whether scales multiply sums. Then x of 16 bits is in another order, and its sums of
  // 32 k come, too, (K / 128, T, 4) float32; x of float32 comes as it is. Where w is quantized
  // along N scales multiply x, which is float32.
  bool scaled;
  const void* x_sums;
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

// Columns of x for the Hopper kernel of weights in layout "linear".
constexpr int64_t PaddedK(int64_t k, bool transpose_w) {
  return transpose_w ? (k + 127) / 128 * 128 : (k + 63) / 64 * 64;
}

}  // namespace jgg

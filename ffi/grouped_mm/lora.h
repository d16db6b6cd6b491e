// Products of low rank, one for each row:
//   out[t] = existing[t] + round(scale * row_scale[t] * x[t] @ a[p]^T) @ b[p]^T      p = pair_of[t]
// in float32; h in the middle is rounded to x's dtype, as the result is. The kernel is
// device/lora_sm80.cuh.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

// The kernel's argument. Row t of x and of the result is their row `row_of[t]`.
struct Lora {
  const char* x;           // (rows, k)
  const char* a;           // (pairs, rank, k), or turned (pairs, k, rank)
  const char* b;           // (pairs, n, rank), or turned (pairs, rank, n)
  const int32_t* pair_of;  // (rows), of row t; none where it is outside of [0, pairs)
  const int32_t* row_of;   // (rows), a permutation; null: t
  const float* row_scale;  // (rows), of x; null: 1
  const char* existing;    // (rows, n), which may be `out`; null: zeros
  char* out;               // (rows, n)
  char* h;                 // (rows, rank), what is between the products; null: nowhere
  int rows, k, n, rank, pairs;
  int span;  // rows of a block
  float scale;
  bool turned;
};

}  // namespace jgg

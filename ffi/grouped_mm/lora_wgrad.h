// Gradients of the factors of products of low rank: for each pair p, of rows t of it,
//   out[0][p] = sum narrow[0][t]^T wide[0][t]   (rank, length[0])
//   out[1][p] = sum wide[1][t]^T narrow[1][t]   (length[1], rank)
// in float32, rounded once. Of a (P, R, K) and b (P, N, R) they are those of a, of x and dh, and of
// b, of ct and h. Of factors that are stored the other way it is the other way round. The kernels
// are device/lora_wgrad_sm80.cuh.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

// The kernels' argument.
struct LoraWgrad {
  const char* wide[2];     // (rows, length[i])
  const char* narrow[2];   // (rows, rank)
  char* out[2];            // (pairs, rank, length[0]), (pairs, length[1], rank)
  const int32_t* pair_of;  // (rows), ascending; none where it is outside of [0, pairs)
  const int32_t* row_of;   // (rows), the row that pair_of[i] is of
  int32_t* begins;         // (pairs + 1): where the rows of a pair begin in row_of
  int length[2];
  int rows, rank, pairs;
  int parts[2];  // blocks that share out the columns of a pair
};

}  // namespace jgg

// The rows of some tokens, sorted by expert: route and dispatch in one, where pairs are so few that
// each block can compare its own with all. jax_groupgemm/_moe/some_tokens.py says where.
#pragma once

#include <cstdint>

#include "moe/rules.h"

namespace jgg {

struct SomeRows {
  const void* x;          // (tokens, D)
  const int32_t* index;   // (tokens, k)
  const int32_t* offset;  // the first expert that is here; null for 0
  void* rows;             // (tokens * k, D): x in the order of experts; the rest may hold anything
  int32_t* place;         // (tokens, k): the row of each pair, or negative
  int32_t* sizes;         // (experts,)
  int32_t tokens, k, experts;
  int32_t pieces;  // of 16 bytes in a line
  // Become zeros: what both products in one kernel count (quantized/up_and_down_sm90.h).
  int32_t* turns = nullptr;
  int32_t turns_count = 0;
};

}  // namespace jgg

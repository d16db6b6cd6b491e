// route: which row each pair of token and expert has, where rows are sorted by expert;
// jax_groupgemm/_moe/routing.py is the definition.
#pragma once

#include <cstdint>

namespace jgg {

struct RouteArgs {
  const int32_t* index;   // (pairs,)
  const int32_t* offset;  // of the first expert that is here; null for 0
  int32_t* order;         // (rows,)
  int32_t* place;         // (pairs,)
  int32_t* sizes;         // (experts,)
  int32_t* overflow;      // ()
  int32_t* counts;        // workspace, (experts, blocks)
  int32_t pairs, rows, experts, blocks;
};

}  // namespace jgg

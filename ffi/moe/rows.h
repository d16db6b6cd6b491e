// dispatch, combine and the backward pass of combine: rows to their experts and back;
// jax_groupgemm/_moe/permute.py is the definition.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"

namespace jgg {

// Which row each pair of a token and one of its k experts has. Both lists may name what does not
// exist: a kernel that reads them takes the last pair, or row, that exists instead.
struct PairRows {
  const int32_t* order;  // (rows,): the pair of each row, or negative; combine has no use for it
  const int32_t* place;  // (tokens, k): the row of each pair, or negative
  int32_t tokens, k, rows;
  int32_t pieces;  // pieces of 16 bytes in a line of the operand that has a line for each row
};

struct DispatchArgs {
  PairRows pairs;
  DType dtype;          // with a weight
  bool clears_rest;     // rows that no pair has become zeros; otherwise they may hold anything
  const void* x;        // (tokens, D)
  const float* weight;  // (tokens, k), or null
  void* out;            // (rows, D)
};

struct CombineArgs {
  PairRows pairs;
  DType dtype, out_dtype;  // out_dtype is dtype, or float32
  const void* rows;        // (rows, D)
  const float* weight;     // (tokens, k), or null
  void* out;               // (tokens, D)
};

struct CombineBackwardArgs {
  PairRows pairs;
  DType dtype, ct_dtype;  // ct_dtype is dtype, or float32
  const void* ct;         // (tokens, D)
  const void* rows;       // (rows, D)
  const float* weight;    // (tokens, k)
  void* drows;            // (rows, D), of dtype
  float* dweight;         // (tokens, k)
};

// Which threads have which pieces of a token's line: `lanes` threads, whole warps, have piece
// slice * columns + c * lanes + i for c = 0, 1, ...; a block has `tokens` tokens.
struct RowsGrid {
  int64_t blocks;
  int32_t lanes, tokens, slices, columns;
};

constexpr int kRowsThreads = 256;

// For threads that have up to `each` pieces; a line has as many slices as that takes. With each = 0
// a block has one slice of one token.
inline RowsGrid MakeRowsGrid(const PairRows& pairs, int each) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t turns = up(pairs.pieces, kRowsThreads * std::max(each, 1));
  const int64_t columns = up(pairs.pieces, turns);
  RowsGrid grid{};
  grid.lanes = static_cast<int32_t>(32 * up(up(columns, std::max(each, 1)), 32));
  grid.columns = static_cast<int32_t>(each ? columns : pairs.pieces);
  grid.slices = static_cast<int32_t>(each ? turns : 1);
  grid.tokens = each ? kRowsThreads / grid.lanes : 1;
  grid.blocks = up(pairs.tokens, grid.tokens) * grid.slices;
  return grid;
}

}  // namespace jgg

// A block has a token. Each of its warps finds the row of a pair: as many as there are pairs of
// earlier experts, and earlier ones of its own. The block then copies the token's line to its rows.
// Blocks also share out the experts, whose pairs their warps count. So no block needs what another
// one has found, and what is written does not depend on their order.
#pragma once

#include <cstdint>

#include "moe/device/rows.cuh"
#include "moe/some_rows.h"

namespace jgg::device {

constexpr int kSomeThreads = 256, kSomeWarps = kSomeThreads / 32;

// The sum over all lanes of how many of the pairs count(expert, pair) accepts.
template <typename Count>
__device__ int CountPairs(const int* experts, int pairs, Count count) {
  int found = 0;
  for (int pair = threadIdx.x % 32; pair < pairs; pair += 32) {
    found += count(experts[pair], pair) ? 1 : 0;
  }
  JGG_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) found += __shfl_xor_sync(kAllLanes, found, mask);
  return found;
}

__global__ void __launch_bounds__(kSomeThreads) SomeRowsKernel(const SomeRows p) {
  __shared__ int experts[rules::kMostSomePairs];  // of each pair; p.experts where it is not here
  __shared__ int rows[rules::kMostSomeChoices];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x;
  const int pairs = p.tokens * p.k;
  const uint4* const line = static_cast<const uint4*>(p.x) + int64_t{token} * p.pieces;
  uint4 first = make_uint4(0, 0, 0, 0);
  if (static_cast<int>(threadIdx.x) < p.pieces) first = LoadOnce(line + threadIdx.x);
  const auto offset = static_cast<uint32_t>(p.offset != nullptr ? *p.offset : 0);
  for (int pair = threadIdx.x; pair < pairs; pair += kSomeThreads) {
    const int expert = p.index[pair];
    const uint32_t local = static_cast<uint32_t>(expert) - offset;
    const bool here =
        expert >= static_cast<int>(offset) && local < static_cast<uint32_t>(p.experts);
    experts[pair] = here ? static_cast<int>(local) : p.experts;
  }
  __syncthreads();
  for (int j = warp; j < p.k; j += kSomeWarps) {
    const int own = token * p.k + j, expert = experts[own];
    const int row = CountPairs(experts, pairs, [&](int other, int pair) {
      return other < expert || (other == expert && pair < own);
    });
    if (lane == 0) p.place[own] = rows[j] = expert < p.experts ? row : -1;
  }
  for (int e = token + warp * p.tokens; e < p.experts; e += kSomeWarps * p.tokens) {
    const int size = CountPairs(experts, pairs, [&](int other, int) { return other == e; });
    if (lane == 0) p.sizes[e] = size;
  }
  __syncthreads();
  uint4* const out = static_cast<uint4*>(p.rows);
  for (int piece = threadIdx.x; piece < p.pieces; piece += kSomeThreads) {
    const uint4 value = piece < kSomeThreads ? first : LoadOnce(line + piece);
    for (int j = 0; j < p.k; ++j) {
      if (rows[j] >= 0) out[int64_t{rows[j]} * p.pieces + piece] = value;
    }
  }
}

}  // namespace jgg::device

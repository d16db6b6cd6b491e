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

// A pair's key orders pairs by expert, then as they come. kNoKey is the key of no pair.
constexpr uint32_t kKeysOfExpert = rules::kMostSomePairs, kNoKey = ~0u;

// How many keys accept(key) holds for, in all lanes. Keys fill whole 128.
template <typename Accept>
__device__ int CountKeys(const uint4* keys, int pairs, Accept accept) {
  int found = 0;
  for (int i = threadIdx.x % 32; 4 * i < pairs; i += 32) {
    const uint4 four = keys[i];
    found += (accept(four.x) ? 1 : 0) + (accept(four.y) ? 1 : 0) + (accept(four.z) ? 1 : 0) +
             (accept(four.w) ? 1 : 0);
  }
  JGG_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) found += __shfl_xor_sync(kAllLanes, found, mask);
  return found;
}

__global__ void __launch_bounds__(kSomeThreads) SomeRowsKernel(const SomeRows p) {
  __shared__ uint4 fours[rules::kMostSomePairs / 4];
  __shared__ int rows[rules::kMostSomeChoices];
  uint32_t* const keys = reinterpret_cast<uint32_t*>(fours);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x;
  const int pairs = p.tokens * p.k;
  const uint4* const line = static_cast<const uint4*>(p.x) + int64_t{token} * p.pieces;
  uint4 first = make_uint4(0, 0, 0, 0);
  if (static_cast<int>(threadIdx.x) < p.pieces) first = LoadOnce(line + threadIdx.x);
  const auto offset = static_cast<uint32_t>(p.offset != nullptr ? *p.offset : 0);
  for (int pair = threadIdx.x; pair < (pairs + 127) / 128 * 128; pair += kSomeThreads) {
    uint32_t key = kNoKey;
    if (pair < pairs) {
      const int expert = p.index[pair];
      const uint32_t local = static_cast<uint32_t>(expert) - offset;
      const bool here =
          expert >= static_cast<int>(offset) && local < static_cast<uint32_t>(p.experts);
      if (here) key = local * kKeysOfExpert + pair;
    }
    keys[pair] = key;
  }
  __syncthreads();
  for (int j = warp; j < p.k; j += kSomeWarps) {
    const uint32_t own = keys[token * p.k + j];
    const int row = CountKeys(fours, pairs, [&](uint32_t key) { return key < own; });
    if (lane == 0) p.place[token * p.k + j] = rows[j] = own == kNoKey ? -1 : row;
  }
  __syncthreads();
  uint4* const out = static_cast<uint4*>(p.rows);
  for (int piece = threadIdx.x; piece < p.pieces; piece += kSomeThreads) {
    const uint4 value = piece < kSomeThreads ? first : LoadOnce(line + piece);
    for (int j = 0; j < p.k; ++j) {
      if (rows[j] >= 0) out[int64_t{rows[j]} * p.pieces + piece] = value;
    }
  }
  for (int i = token * kSomeThreads + threadIdx.x; i < p.turns_count;
       i += p.tokens * kSomeThreads) {
    p.turns[i] = 0;
  }
  for (int e = token + warp * p.tokens; e < p.experts; e += kSomeWarps * p.tokens) {
    const int size = CountKeys(
        fours, pairs, [&](uint32_t key) { return key - e * kKeysOfExpert < kKeysOfExpert; });
    if (lane == 0) p.sizes[e] = size;
  }
}

}  // namespace jgg::device

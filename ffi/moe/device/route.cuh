// A counting sort by expert, stable and with the same result in every run. A block takes
// kRoutePairs neighbouring pairs, and each of its warps takes an eighth of those.
//
//   RouteCount  counts[e, b] = pairs of expert e in block b
//   RouteScan   counts[e, b] = those in the blocks before b; sizes[e] = all of them
//   RoutePlace  a pair's row: its expert's first one + counts[e, b] + the earlier pairs of e in b
//
// One block alone needs RoutePlace only.
#pragma once

#include <cstdint>

#include "grouped_mm/device/scan.cuh"
#include "moe/route.h"
#include "moe/rules.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr int kRouteThreads = 256, kRouteWarps = kRouteThreads / 32;
constexpr int kRouteItems = rules::kRoutePairs / kRouteThreads;  // pairs of a thread
constexpr int kExpertsOfThread = rules::kMostExperts / kRouteThreads;
constexpr int kScanItems = 4;

// The expert in [0, experts), or `experts` where it is not here. A difference may be as large as
// a uint32.
__device__ inline int LocalExpert(const RouteArgs& args, int pair, int first) {
  if (pair >= args.pairs) return args.experts;
  const int expert = args.index[pair];
  const uint32_t local = static_cast<uint32_t>(expert) - static_cast<uint32_t>(first);
  const bool here = expert >= first && local < static_cast<uint32_t>(args.experts);
  return here ? static_cast<int>(local) : args.experts;
}

__device__ inline int FirstExpert(const RouteArgs& args) { return args.offset ? *args.offset : 0; }

__global__ void __launch_bounds__(kRouteThreads) RouteCount(const RouteArgs args) {
  __shared__ int counts[rules::kMostExperts];
  const int first = FirstExpert(args), base = blockIdx.x * rules::kRoutePairs;
  int experts[kRouteItems];
  JGG_UNROLL
  for (int i = 0; i < kRouteItems; ++i) {
    experts[i] = LocalExpert(args, base + i * kRouteThreads + threadIdx.x, first);
  }
  for (int e = threadIdx.x; e < args.experts; e += kRouteThreads) counts[e] = 0;
  __syncthreads();
  JGG_UNROLL
  for (int i = 0; i < kRouteItems; ++i) {
    if (experts[i] < args.experts) atomicAdd(&counts[experts[i]], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += kRouteThreads) {
    args.counts[int64_t{e} * args.blocks + blockIdx.x] = counts[e];
  }
}

// A warp for each expert.
__global__ void __launch_bounds__(kRouteThreads) RouteScan(const RouteArgs args) {
  const int lane = threadIdx.x % 32, expert = blockIdx.x * kRouteWarps + threadIdx.x / 32;
  if (expert >= args.experts) return;
  int32_t* const counts = args.counts + int64_t{expert} * args.blocks;
  int before = 0;
  for (int base = 0; base < args.blocks; base += 32 * kScanItems) {
    int values[kScanItems];
    JGG_UNROLL
    for (int i = 0; i < kScanItems; ++i) {
      const int block = base + 32 * i + lane;
      values[i] = block < args.blocks ? counts[block] : 0;
    }
    JGG_UNROLL
    for (int i = 0; i < kScanItems; ++i) {
      int inclusive = values[i];
      JGG_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        const int earlier = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (lane >= distance) inclusive += earlier;
      }
      const int block = base + 32 * i + lane;
      if (block < args.blocks) counts[block] = before + inclusive - values[i];
      before += __shfl_sync(0xffffffffu, inclusive, 31);
    }
  }
  if (lane == 0) args.sizes[expert] = before;
}

template <bool kAlone>
__global__ void __launch_bounds__(kRouteThreads) RoutePlace(const RouteArgs args) {
  // By warp and expert: pairs, then the row of the next one.
  __shared__ int next[kRouteWarps * rules::kMostExperts];
  __shared__ int scratch[kRouteWarps];
  const int experts = args.experts, first = FirstExpert(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.x, base = block * rules::kRoutePairs;
  const int of_warp = base + warp * 32 * kRouteItems;

  int key[kRouteItems], rank[kRouteItems];
  JGG_UNROLL
  for (int i = 0; i < kRouteItems; ++i) key[i] = LocalExpert(args, of_warp + 32 * i + lane, first);
  // This thread has the experts first_own + q, q < own.
  const int own = (experts + kRouteThreads - 1) / kRouteThreads, first_own = threadIdx.x * own;
  int size[kExpertsOfThread], before[kExpertsOfThread];
  JGG_UNROLL
  for (int q = 0; q < kExpertsOfThread; ++q) {
    const int e = first_own + q;
    const bool read = !kAlone && q < own && e < experts;
    size[q] = read ? args.sizes[e] : 0;
    before[q] = read ? args.counts[int64_t{e} * args.blocks + block] : 0;
  }
  for (int i = threadIdx.x; i < kRouteWarps * experts; i += kRouteThreads) next[i] = 0;
  __syncthreads();

  int* const mine = next + warp * experts;
  JGG_UNROLL
  for (int i = 0; i < kRouteItems; ++i) {
    const uint32_t alike = __match_any_sync(0xffffffffu, key[i]);
    const bool here = key[i] < experts;
    const int earlier = here ? mine[key[i]] : 0;
    const int among = __popc(alike & ((1u << lane) - 1));
    __syncwarp();
    if (here && among == 0) mine[key[i]] = earlier + __popc(alike);
    __syncwarp();
    rank[i] = earlier + among;
  }
  __syncthreads();

  int sum = 0;
  JGG_UNROLL
  for (int q = 0; q < kExpertsOfThread; ++q) {
    const int e = first_own + q;
    if (q >= own || e >= experts) continue;
    if constexpr (kAlone) {
      JGG_UNROLL
      for (int w = 0; w < kRouteWarps; ++w) size[q] += next[w * experts + e];
      args.sizes[e] = size[q];
    }
    sum += size[q];
  }
  int total;
  const auto add = [](int a, int b) { return a + b; };
  int start = ExclusiveScan<kRouteThreads>(sum, 0, add, scratch, &total);
  JGG_UNROLL
  for (int q = 0; q < kExpertsOfThread; ++q) {
    const int e = first_own + q;
    if (q >= own || e >= experts) continue;
    int row = start + before[q];
    JGG_UNROLL
    for (int w = 0; w < kRouteWarps; ++w) {
      const int count = next[w * experts + e];
      next[w * experts + e] = row;
      row += count;
    }
    start += size[q];
  }
  __syncthreads();

  JGG_UNROLL
  for (int i = 0; i < kRouteItems; ++i) {
    const int pair = of_warp + 32 * i + lane;
    if (pair >= args.pairs) continue;
    int row = key[i] < experts ? mine[key[i]] + rank[i] : args.rows;
    if (row < args.rows) {
      args.order[row] = pair;
    } else {
      row = -1;
    }
    args.place[pair] = row;
    // Rows behind the last: there are no more rows than pairs.
    if (pair >= total && pair < args.rows) args.order[pair] = -1;
  }
  if (block == 0 && threadIdx.x == 0) *args.overflow = total > args.rows ? total - args.rows : 0;
}

}  // namespace jgg::device

// Collective operations of one thread block, and what else everybody needs.
#pragma once

#include <cstdint>

namespace jgg::device {

constexpr int Log2(int value) { return value <= 1 ? 0 : 1 + Log2(value / 2); }

// The combination of the values of all earlier threads, and in *total that of all threads.
// `scratch` holds one value per warp, and may be reused when the call returns.
template <int kThreads, typename T, typename Combine>
__device__ T ExclusiveScan(T value, T identity, Combine combine, T* scratch, T* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T earlier = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive = combine(earlier, inclusive);
  }
  if (lane == 31) scratch[warp] = inclusive;
  T before = __shfl_up_sync(0xffffffffu, inclusive, 1);
  if (lane == 0) before = identity;
  __syncthreads();
  T all = identity;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) before = combine(all, before);
    all = combine(all, scratch[w]);
  }
  __syncthreads();
  *total = all;
  return before;
}

// The smallest index in [first, count) for which `wanted` holds, or `count`; the same in every
// thread. `scratch` holds one value per warp, and may be reused when the call returns.
template <int kThreads, typename Wanted>
__device__ int FindFirst(int first, int count, Wanted wanted, int* scratch) {
  for (int base = first; base < count; base += kThreads) {
    const int index = base + threadIdx.x;
    const unsigned ballot = __ballot_sync(0xffffffffu, index < count && wanted(index));
    if (threadIdx.x % 32 == 0) {
      scratch[threadIdx.x / 32] = ballot == 0 ? count : base + threadIdx.x + __ffs(ballot) - 1;
    }
    __syncthreads();
    int found = count;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) found = min(found, scratch[w]);
    __syncthreads();
    if (found < count) return found;
  }
  return count;
}

}  // namespace jgg::device

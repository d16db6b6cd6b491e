// A 64 x 64 output tile held in registers by 256 threads, 4 x 4 values each, fed from shared
// memory in slices of 16 along the contracted axis. Float32 FMA throughout.
#pragma once

#include <cstdint>

namespace jgg::device {

constexpr int kTile = 64;
constexpr int kSlice = 16;
constexpr int kThreads = 256;
constexpr int kPerThread = 4;

struct Slices {
  float a[kSlice][kTile + 1];  // +1: the transposing stores below would meet in one bank
  float b[kSlice][kTile + 1];
};

struct Position {
  // This thread's values: rows row0 + 16 i and columns column0 + 16 j of the tile.
  __device__ Position() : row0(threadIdx.x / 16), column0(threadIdx.x % 16) {}
  int row0, column0;
};

// acc += a^T b over one slice.
__device__ inline void MultiplyAdd(float (&acc)[kPerThread][kPerThread], const Slices& slices,
                                   const Position& at) {
#pragma unroll
  for (int k = 0; k < kSlice; ++k) {
    float a[kPerThread], b[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) a[i] = slices.a[k][at.row0 + 16 * i];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) b[j] = slices.b[k][at.column0 + 16 * j];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) acc[i][j] += a[i] * b[j];
    }
  }
}

// Fill a slice with load(k, column); `k_fast` says along which axis memory is contiguous.
template <typename Load>
__device__ inline void FillSlice(float (&slice)[kSlice][kTile + 1], bool k_fast, Load load) {
#pragma unroll
  for (int step = 0; step < kSlice * kTile / kThreads; ++step) {
    const int index = step * kThreads + threadIdx.x;
    const int k = k_fast ? index % kSlice : index / kTile;
    const int column = k_fast ? index / kSlice : index % kTile;
    slice[k][column] = load(k, column);
  }
}

// In ascending order, the segments for which `wanted` holds: found 256 at a time by all threads,
// then visited one by one by all threads.
template <typename Segment, typename Wanted, typename Visit>
__device__ inline void ForEachSegment(const Segment* segments, int64_t count, Wanted wanted,
                                      Visit visit) {
  __shared__ unsigned found[kThreads / 32];
  for (int64_t first = 0; first < count; first += kThreads) {
    const int64_t mine = first + threadIdx.x;
    const bool take = mine < count && wanted(segments[mine]);
    const unsigned ballot = __ballot_sync(0xffffffffu, take);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = ballot;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      for (unsigned bits = found[warp]; bits != 0; bits &= bits - 1) {
        visit(segments[first + warp * 32 + __ffs(bits) - 1]);
      }
    }
    __syncthreads();
  }
}

}  // namespace jgg::device

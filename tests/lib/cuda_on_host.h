// Enough of CUDA to run a kernel, a thread for each thread of a block: of one warp after the other
// where they meet only within warps, of a whole block where it has barriers. Include it before the
// kernel. Reads by __ldg must be of memory in `readable`.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "block_on_host.h"

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline

struct int2 {
  int32_t x, y;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using std::max;
using std::min;

struct Index {
  unsigned x, y, z = 1;
};
struct Warp {
  Barrier barrier{32};
  uint64_t exchanged[32];
};
struct Thread {
  Index index, block_index;
  Warp* warp = nullptr;
  Barrier* block = nullptr;
};
inline thread_local OfThread<Thread> this_thread;
#define threadIdx (this_thread->index)
#define blockIdx (this_thread->block_index)
inline Index gridDim;
inline std::vector<std::pair<const char*, size_t>> readable;

inline void __syncwarp() { this_thread->warp->barrier.arrive_and_wait(); }
inline void __syncthreads() { this_thread->block->arrive_and_wait(); }

// Whether it is so in any thread of the block.
inline bool __syncthreads_or(bool value) {
  static std::atomic<bool> found;
  if (value) found = true;
  __syncthreads();
  const bool result = found;
  __syncthreads();
  found = false;
  __syncthreads();
  return result;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned lane = threadIdx.x % 32;
  std::memcpy(&this_thread->warp->exchanged[lane], &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, &this_thread->warp->exchanged[lane ^ mask], sizeof(T));
  __syncwarp();
  return value;
}

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  std::memcpy(&this_thread->warp->exchanged[threadIdx.x % 32], &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, &this_thread->warp->exchanged[from % 32], sizeof(T));
  __syncwarp();
  return value;
}

template <typename T>
T __shfl_up_sync(unsigned all, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(all, value, static_cast<int>(lane < distance ? lane : lane - distance));
}

// function(what every lane has), by lane.
template <typename T, typename Function>
auto OfAllLanes(T value, Function function) {
  std::memcpy(&this_thread->warp->exchanged[threadIdx.x % 32], &value, sizeof(T));
  __syncwarp();
  T values[32];
  for (int lane = 0; lane < 32; ++lane)
    std::memcpy(&values[lane], &this_thread->warp->exchanged[lane], sizeof(T));
  __syncwarp();
  return function(values);
}

// The lanes that have this lane's value.
template <typename T>
uint32_t __match_any_sync(unsigned, T value) {
  return OfAllLanes(value, [&](const T* values) {
    uint32_t found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= uint32_t{values[lane] == value} << lane;
    return found;
  });
}

inline uint32_t __ballot_sync(unsigned, bool value) {
  return OfAllLanes(value, [](const bool* values) {
    uint32_t found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= uint32_t{values[lane]} << lane;
    return found;
  });
}

inline bool __all_sync(unsigned all, bool value) { return __ballot_sync(all, value) == ~0u; }

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __ffs(uint32_t value) { return __builtin_ffs(static_cast<int>(value)); }

inline uint32_t __reduce_max_sync(unsigned all, uint32_t value) {
  for (int mask = 1; mask < 32; mask *= 2) value = max(value, __shfl_xor_sync(all, value, mask));
  return value;
}

inline uint32_t __reduce_add_sync(unsigned all, uint32_t value) {
  for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(all, value, mask);
  return value;
}

inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
  std::atomic_ref<uint32_t> shared(*at);
  uint32_t old = shared;
  while (old < value && !shared.compare_exchange_weak(old, value)) {
  }
  return old;
}

inline int atomicAdd(int* at, int value) { return std::atomic_ref<int>(*at).fetch_add(value); }

template <typename T>
T __ldcg(const T* from) {
  return std::atomic_ref<T>(*const_cast<T*>(from));
}

template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

inline bool Readable(const void* from, size_t bytes) {
  const char* at = static_cast<const char*>(from);
  return std::any_of(readable.begin(), readable.end(), [&](const auto& part) {
    return at >= part.first && at + bytes <= part.first + part.second;
  });
}

template <typename T>
T __ldg(const T* from) {
  const char* at = reinterpret_cast<const char*>(from);
  const bool inside = Readable(at, sizeof(T));
  if (!inside || reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) {
    std::fprintf(stderr, "a read outside of every operand, or not aligned\n");
    std::abort();
  }
  return *from;
}

// Blocks at.x, at.x + 1, ... at once, `warps` of each from number `first` on.
template <typename Kernel>
void RunCluster(unsigned blocks, Index at, unsigned first, unsigned warps, Kernel kernel) {
  struct Block {
    std::vector<Warp> warps;
    Barrier barrier;
  };
  const unsigned threads = 32 * warps;
  std::vector<std::unique_ptr<Block>> cluster;
  for (unsigned b = 0; b < blocks; ++b) {
    cluster.emplace_back(new Block{std::vector<Warp>(warps), Barrier(threads)});
  }
  RunTogether(blocks * threads, [&](unsigned i) {
    Block& block = *cluster[i / threads];
    Warp& warp = block.warps[i % threads / 32];
    *this_thread = {
        {32 * first + i % threads, 0}, {at.x + i / threads, at.y}, &warp, &block.barrier};
    kernel();
    warp.barrier.arrive_and_drop();
    block.barrier.arrive_and_drop();
  });
}

template <typename Kernel>
void Run(unsigned blocks, unsigned threads, Kernel kernel) {
  for (unsigned i = 0; i < blocks; ++i) {
    for (unsigned one = 0; one < threads / 32; ++one) RunCluster(1, {i, 0}, one, 1, kernel);
  }
}

// Runs the blocks of a kernel with barriers.
template <typename Kernel>
void RunBlocks(Index grid, unsigned threads, Kernel kernel) {
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) RunCluster(1, {x, y}, 0, threads / 32, kernel);
  }
}

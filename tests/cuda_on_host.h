// Enough of CUDA to run a kernel whose threads meet only within warps: one warp at a time, a thread
// for each lane. Include it before the kernel. Reads by __ldg must be of memory in `readable`.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using std::max;
using std::min;

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline std::barrier<>* warp = nullptr;
inline uint64_t exchanged[32];
inline std::vector<std::pair<const char*, size_t>> readable;

inline void __syncwarp() { warp->arrive_and_wait(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned lane = threadIdx.x % 32;
  std::memcpy(&exchanged[lane], &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, &exchanged[lane ^ mask], sizeof(T));
  __syncwarp();
  return value;
}

template <typename T>
T __ldg(const T* from) {
  const char* at = reinterpret_cast<const char*>(from);
  const bool inside = std::any_of(readable.begin(), readable.end(), [&](const auto& part) {
    return at >= part.first && at + sizeof(T) <= part.first + part.second;
  });
  if (!inside || reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) {
    std::fprintf(stderr, "a read outside of every operand, or not aligned\n");
    std::abort();
  }
  return *from;
}

template <typename Kernel>
void Run(unsigned blocks, unsigned threads, Kernel kernel) {
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned first = 0; first < threads; first += 32) {
      std::barrier<> barrier(32);
      warp = &barrier;
      std::vector<std::thread> lanes;
      for (unsigned lane = 0; lane < 32; ++lane) {
        lanes.emplace_back([&, lane] {
          blockIdx.x = block;
          threadIdx.x = first + lane;
          kernel();
          barrier.arrive_and_drop();
        });
      }
      for (auto& lane : lanes) lane.join();
    }
  }
}

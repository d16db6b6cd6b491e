// ffi/quantized/device/warp_sm90.cuh on the host, and the copies of primitives_sm90.cuh that
// kernels there use. Include it after cuda_on_host.h.
#pragma once

#include "cuda_on_host.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

// The dynamic shared memory of a block, of which one runs at a time.
inline char* DynamicMemory() {
  alignas(16) static char memory[227 << 10];
  return memory;
}

inline uint32_t Forgotten(uint32_t number) { return number; }

// The values of all lanes.
template <typename T>
std::array<T, 32> AllLanes(T value) {
  return OfAllLanes(value, [](const T* values) {
    std::array<T, 32> all;
    std::copy_n(values, 32, all.begin());
    return all;
  });
}

inline void LoadMatrices(const char* row, uint32_t (&to)[4]) {
  const auto rows = AllLanes(row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) std::memcpy(&to[i], rows[8 * i + lane / 4] + lane % 4 * 4, 4);
}

inline void LoadOrZeros(bool load, const char* from, uint32_t* to) {
  std::memset(to, 0, 16);
  if (load) std::memcpy(to, from, 16);
}

// An 8 x 8 matrix of 16-bit values, turned: lane 4 * r + c has (r, 2 * c) and its neighbour.
inline uint32_t Turned(uint32_t matrix) {
  const auto words = AllLanes(matrix);
  const int lane = threadIdx.x % 32, line = lane / 4, first = lane % 4 * 2;
  const auto value = [&](int row) {
    return words[4 * row + line / 2] >> (16 * (line % 2)) & 0xffff;
  };
  return value(first) | value(first + 1) << 16;
}

// Products of 16 bits are exact in float32; sums are rounded one by one.
template <DType kX = DType::kBF16>
void MultiplyWarp(const uint32_t* a, uint32_t b0, uint32_t b1, float* sums) {
  const auto both = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
  const auto k_low = AllLanes(both(a[0], a[1])), k_high = AllLanes(both(a[2], a[3]));
  const auto b = AllLanes(both(b0, b1));
  const auto number = [](uint64_t words, int which) {
    return Half<kX>(static_cast<uint32_t>(words >> (16 * which)), 0);
  };
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, lower = i / 2, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int of = k % 8 / 2;
      const uint64_t line = (k < 8 ? k_low : k_high)[4 * row + of];
      sums[i] += number(line, 2 * lower + k % 2) * number(b[4 * column + of], k / 8 * 2 + k % 2);
    }
  }
}

// 16 bytes, or zeros. They are only there once they have been waited for.
struct PendingPiece {
  const void* from;
  void* to;
  int bytes;
};
inline thread_local OfThread<std::vector<PendingPiece>> pending;

inline void CopyPiece(const void* from, void* to, int bytes) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const bool right = aligned(to) && aligned(from) && (bytes == 0 || bytes == 16);
  if (!right || (bytes > 0 && !Readable(from, 16))) {
    std::fprintf(stderr, "a piece that is not aligned, or is outside of every operand\n");
    std::abort();
  }
  std::memset(to, 0xff, 16);
  pending->push_back({from, to, bytes});
}

inline void WaitCopied() {
  for (const auto& piece : *pending) {
    std::memset(piece.to, 0, 16);
    std::memcpy(piece.to, piece.from, piece.bytes);
  }
  pending->clear();
}

inline void PrefetchToL2(const void*) {}
inline void AllowNextKernel() {}
inline void WaitForPreviousKernel() {}

}  // namespace jgg::device

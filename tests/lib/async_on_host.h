// ffi/quantized/device/async_sm80.cuh on the host. Include it after warp_on_host.h.
#pragma once

#include "warp_on_host.h"

namespace jgg::device {

// ... of which one runs at a time.
inline unsigned char* SharedBytes() {
  alignas(128) static unsigned char memory[227 << 10];
  return memory;
}

using Place = char*;
inline Place PlaceOf(const void* shared) {
  return const_cast<char*>(static_cast<const char*>(shared));
}
inline Place Flipped(Place place, int bits) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(place) ^ static_cast<uintptr_t>(bits));
}
template <int kCount>
void LoadPlace(Place from, uint32_t* to) {
  if (reinterpret_cast<uintptr_t>(from) % (4 * kCount) != 0) std::abort();
  std::memcpy(to, from, 4 * kCount);
}

// Pieces are only there once their group has been waited for.
inline thread_local OfThread<std::vector<std::vector<PendingPiece>>> groups;

template <int kBit = 0>
void CopyIf(uint32_t wanted, Place to, const char* from) {
  if ((wanted & 1u << kBit) == 0) return;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (!aligned(to) || !aligned(from) || !Readable(from, 16)) {
    std::fprintf(stderr, "a piece that is not aligned, or is outside of every operand\n");
    std::abort();
  }
  std::memset(to, 0xff, 16);
  pending->push_back({from, to, 16});
}

// If `wanted`, 16 bytes, or as many zeros.
inline void CopyAsync(Place to, const void* from, bool wanted, bool zeros) {
  if (wanted) CopyPiece(from, to, zeros ? 0 : 16);
}

inline void EndCopies() {
  groups->push_back(*pending);
  pending->clear();
}

template <int kNewer>
void WaitForCopies() {
  while (groups->size() > kNewer) {
    for (const PendingPiece& piece : groups->front()) {
      std::memset(piece.to, 0, 16);
      std::memcpy(piece.to, piece.from, piece.bytes);
    }
    groups->erase(groups->begin());
  }
}

inline void LoadMatricesAt(Place row, uint32_t (&to)[4]) {
  LoadMatrices(static_cast<const char*>(row), to);
}

template <bool kTransposed>
void LoadMatrices(Place row, uint32_t (&to)[4]) {
  LoadMatricesAt(row, to);
  if constexpr (kTransposed) {
    for (uint32_t& matrix : to) matrix = Turned(matrix);
  }
}

template <DType kX>
void MultiplyAtoms(const uint32_t* a, uint32_t b0, uint32_t b1, float* sums) {
  MultiplyWarp<kX>(a, b0, b1, sums);
}

inline uint4 LoadOnce(const char* from) { return __ldg(reinterpret_cast<const uint4*>(from)); }

inline void Advance(const char*& from, int64_t by) { from += by; }
inline int ThreadAnew() { return static_cast<int>(threadIdx.x); }

}  // namespace jgg::device

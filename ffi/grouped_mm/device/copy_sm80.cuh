// Global to shared memory: the slices of one tile of an operand, by `cp.async` in the widest pieces
// that its alignment allows, with zeros wherever the tile reaches past the operand.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"

namespace jgg::device {

// Moves slices of kMn x kK elements into shared memory laid out as `SharedTile` says, which keeps
// pieces of 16 bytes whole.
//
// An operand consists of lines, along which memory is contiguous ("cont"): one line per m (or n)
// where it is K-major, one per k where it is MN-major. Reads are rounded outwards along a line to
// whole pieces of `width` elements; lines outside the bounds are never touched.
template <typename Element, bool kKMajor, int kMn, int kK, int kThreads, typename SharedTile>
class TileCopy {
 public:
  // Begin a tile. `origin` is its element (0, 0), `line` the distance of two lines; only
  // [mn_lo, mn_hi) is wanted. From the middle of the tile on, mn is `upper` elements further away.
  __device__ void Begin(const Element* origin, int64_t line, int mn_lo, int mn_hi, int width,
                        int half, int64_t upper) {
    from_ = origin + Line() * line + Cont();
    line_ = line;
    width_ = width;
    wanted_ = 0;
    upper_ = kKMajor ? upper : 0;
    if constexpr (kKMajor) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        int mn = Line() + i * kLinesPerStep;
        if (mn >= half) mn -= half;
        if (mn >= mn_lo && mn < mn_hi) wanted_ |= 1u << i;
      }
    } else {
      int mn = Cont();
      if (mn >= half) {
        mn -= half;
        from_ += upper;
      }
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if (mn + j >= mn_lo && mn + j < mn_hi) wanted_ |= 1u << j;
      }
    }
  }

  // Start copying the slice from k0 on, of which k in [k_lo, k_hi) is wanted. Slices come in order.
  __device__ void Next(Element* slice, int k0, int k_lo, int k_hi) {
    const int k = k0 + (kKMajor ? Cont() : Line());
    if (width_ == kPiece) {
      const bool inside = kKMajor ? k + kPiece > k_lo && k < k_hi : wanted_ != 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int at = k + i * kLinesPerStep;
        const bool take = inside && (kKMajor ? wanted_ >> i & 1 : at >= k_lo && at < k_hi);
        if (HasLine(i)) {
          cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
              *reinterpret_cast<const cute::uint128_t*>(From(i)),
              *reinterpret_cast<cute::uint128_t*>(slice + First() + StepOffset(i)), take);
        }
      }
    } else {
      NextNarrow(slice, k, k_lo, k_hi);
    }
    from_ += kKMajor ? kK : kK * line_;
  }

  // Zero what this thread copied from outside [k_lo, k_hi), beside what lies inside.
  __device__ void ZeroOutside(Element* slice, int k0, int k_lo, int k_hi) const {
    if constexpr (kKMajor) {
      const int k = k0 + Cont();
      if (k >= k_lo && k + kPiece <= k_hi) return;
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        if (!HasLine(i)) break;
        Element* piece = slice + First() + StepOffset(i);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          if (k + j < k_lo || k + j >= k_hi) piece[j] = Element(0);
        }
      }
    }
  }

 private:
  static constexpr int kPiece = 16 / sizeof(Element);
  static constexpr int kLines = kKMajor ? kMn : kK;
  static constexpr int kPiecesPerLine = (kKMajor ? kK : kMn) / kPiece;
  static constexpr int kLinesPerStep = kThreads / kPiecesPerLine;
  static constexpr int kSteps = (kLines + kLinesPerStep - 1) / kLinesPerStep;
  static_assert(kThreads % kPiecesPerLine == 0);
  static_assert(kLinesPerStep >= kLines || kLinesPerStep % SharedTile::kPeriod == 0);

  // Where this thread begins.
  __device__ static int Line() { return threadIdx.x / kPiecesPerLine; }
  __device__ static int Cont() { return threadIdx.x % kPiecesPerLine * kPiece; }
  __device__ static int First() {
    typename SharedTile::Layout layout;
    return kKMajor ? layout(Line(), Cont()) : layout(Cont(), Line());
  }

  __device__ static bool HasLine(int i) {
    return kLines % kLinesPerStep == 0 || Line() + i * kLinesPerStep < kLines;
  }

  // Steps are whole periods of the swizzle, which they leave as it is.
  __device__ static int StepOffset(int i) {
    typename SharedTile::Plain plain;
    return kKMajor ? plain(i * kLinesPerStep, 0) : plain(0, i * kLinesPerStep);
  }

  __device__ const Element* From(int i) const {
    const bool beyond = kKMajor && i * kLinesPerStep >= kMn / 2;
    return from_ + i * kLinesPerStep * line_ + (beyond ? upper_ : 0);
  }

  // Pieces of 4 bytes, or single elements where not even those are aligned.
  __device__ void NextNarrow(Element* slice, int k, int k_lo, int k_hi) const {
    constexpr int kWord = 4 / sizeof(Element);
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      if (!HasLine(i)) break;
      const int at = k + (kKMajor ? 0 : i * kLinesPerStep);
      // Which elements of the piece are wanted.
      uint32_t wanted = 0;
      if constexpr (kKMajor) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          if (at + j >= k_lo && at + j < k_hi) wanted |= 1u << j;
        }
        if (!(wanted_ >> i & 1)) wanted = 0;
      } else {
        wanted = at >= k_lo && at < k_hi ? wanted_ : 0;
      }
      const Element* from = From(i);
      Element* to = slice + First() + StepOffset(i);
      if (kWord == 1 || width_ >= kWord) {
#pragma unroll
        for (int j = 0; j < kPiece; j += kWord) {
          cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>::copy(
              *reinterpret_cast<const uint32_t*>(from + j), *reinterpret_cast<uint32_t*>(to + j),
              (wanted >> j & ((1u << kWord) - 1)) != 0);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) to[j] = wanted >> j & 1 ? from[j] : Element(0);
      }
    }
  }

  const Element* from_;
  int64_t line_, upper_;
  uint32_t wanted_;  // K-major: which of this thread's lines; MN-major: which of its columns
  int width_;
};

}  // namespace jgg::device

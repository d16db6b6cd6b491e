// Global to shared memory: the slices of one tile of an operand, by `cp.async` in the widest pieces
// that its alignment allows, with zeros wherever the tile reaches past the operand.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"

namespace jgg::device {

// Numbers that are the same for every tile of an operand, and so are not kept in registers.
struct Lines {
  int64_t distance;  // elements from one line to the next
  int64_t upper;  // extra distance to the tile's second half, where the two halves of N are apart
};

// Moves slices of kMn x kK elements into shared memory laid out as `SharedTile` says, which keeps
// pieces of 16 bytes whole.
//
// An operand consists of lines, along which memory is contiguous ("cont"): one line per m (or n)
// where it is K-major, one per k where it is MN-major. Reads are rounded outwards along a line to
// whole pieces of `width` elements; lines outside the bounds are never touched. kAligned: pieces
// are always of 16 bytes.
template <typename Element, bool kKMajor, int kMn, int kK, int kThreads, typename SharedTile,
          bool kAligned = false>
class TileCopy {
 public:
  // Begin a tile. `origin` is its element (0, 0); only [mn_lo, mn_hi) is wanted, where mn counts
  // anew from `half` on.
  __device__ void Begin(const Element* origin, const Lines& lines, int mn_lo, int mn_hi, int width,
                        int half) {
    from_ = origin + Line() * lines.distance + Cont();
    width_ = width;
    wanted_ = 0;
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
        from_ += lines.upper;
      }
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if (mn + j >= mn_lo && mn + j < mn_hi) wanted_ |= 1u << j;
      }
    }
  }

  // Start copying the slice from k0 on, of which k in [k_lo, k_hi) is wanted. Slices come in order.
  __device__ void Next(Element* slice, const Lines& lines, int k0, int k_lo, int k_hi) {
    const int k = k0 + (kKMajor ? Cont() : Line());
    if (kAligned || width_ == kPiece) {
      const bool inside = kKMajor ? k + kPiece > k_lo && k < k_hi : wanted_ != 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int at = k + i * kLinesPerStep;
        const bool take = inside && (kKMajor ? wanted_ >> i & 1 : at >= k_lo && at < k_hi);
        if (HasLine(i)) {
          cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
              *reinterpret_cast<const cute::uint128_t*>(From(lines, i)),
              *reinterpret_cast<cute::uint128_t*>(slice + First() + StepOffset(i)), take);
        }
      }
    } else {
      NextNarrow(slice, lines, k, k_lo, k_hi);
    }
    from_ += kKMajor ? kK : kK * lines.distance;
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

  // Steps are whole periods of the swizzle, so they do not change it.
  __device__ static int StepOffset(int i) {
    typename SharedTile::Plain plain;
    return kKMajor ? plain(i * kLinesPerStep, 0) : plain(0, i * kLinesPerStep);
  }

  __device__ const Element* From(const Lines& lines, int i) const {
    const bool beyond = kKMajor && i * kLinesPerStep >= kMn / 2;
    return from_ + i * kLinesPerStep * lines.distance + (beyond ? lines.upper : 0);
  }

  // Pieces of 4 bytes, or single elements where not even those are aligned.
  __device__ void NextNarrow(Element* slice, const Lines& lines, int k, int k_lo, int k_hi) const {
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
      const Element* from = From(lines, i);
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
  uint32_t wanted_;  // K-major: which of this thread's lines; MN-major: which of its columns
  int width_;
};

// The same for K-major operands of 4 bytes an element whose tile in shared memory is MN-major. A
// thread copies every element on its own, so any alignment will do, and no bound needs rounding.
template <typename Element, int kMn, int kK, int kThreads, typename SharedTile>
class TransposingCopy {
 public:
  __device__ void Begin(const Element* origin, const Lines& lines, int mn_lo, int mn_hi, int,
                        int half) {
    from_ = origin + Mn() * lines.distance + K();
    wanted_ = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int mn = Mn() + i * kMnPerStep;
      if (mn >= half) mn -= half;
      if (mn >= mn_lo && mn < mn_hi) wanted_ |= 1u << i;
    }
  }

  __device__ void Next(Element* slice, const Lines& lines, int k0, int k_lo, int k_hi) {
    const int k = k0 + K();
    const bool inside = k >= k_lo && k < k_hi;
    typename SharedTile::Layout layout;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t upper = i * kMnPerStep >= kMn / 2 ? lines.upper : 0;
      const Element* from = from_ + i * kMnPerStep * lines.distance + upper;
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>::copy(
          *reinterpret_cast<const uint32_t*>(from),
          *reinterpret_cast<uint32_t*>(slice + layout(Mn() + i * kMnPerStep, K())),
          inside && (wanted_ >> i & 1));
    }
    from_ += kK;
  }

  __device__ void ZeroOutside(Element*, int, int, int) const {}

 private:
  static constexpr int kMnPerStep = kThreads / kK, kSteps = kMn / kMnPerStep;
  static_assert(sizeof(Element) == 4 && kThreads % (4 * kK) == 0 && kMn % kMnPerStep == 0);
  static_assert(SharedTile::kStride % 8 == 4);
  static_assert(kSteps <= 32 && (kMn / 2 % kMnPerStep == 0 || kSteps == 1));

  // A warp copies 8 k (a sector) of 4 lines, which fall into 32 banks.
  __device__ static int K() { return threadIdx.x % 8 + threadIdx.x / 32 % (kK / 8) * 8; }
  __device__ static int Mn() { return threadIdx.x / 8 % 4 + threadIdx.x / 32 / (kK / 8) * 4; }

  const Element* from_;
  uint32_t wanted_;  // which of this thread's lines
};

}  // namespace jgg::device

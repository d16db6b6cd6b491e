// The kernels of fp8_quantize that read x (M, R, C) in tiles of 128 rows: blocks of 128 along R,
// which may be grouped, stored transposed; blocks of 128 x 128, stored as x is or transposed.
#pragma once

#include <algorithm>

#include "fp8/device/quantize.cuh"

namespace jgg::fp8::device {

inline constexpr int kSpan = 64;          // columns of four warps
inline constexpr int kSpanThreads = 128;  // of which each has 8 x 8 elements
inline constexpr int kSpanWarps = kSpanThreads / 32;

// Thread blocks for a matrix.
inline int64_t SquaresBlocks(const QuantizeParams& p) {
  return CeilDiv(p.rows, kBlock) * CeilDiv(p.columns, kBlock);
}

inline int64_t ColumnsBlocks(const QuantizeParams& p) {
  return p.blocks * CeilDiv(p.columns, kSpan);
}

// Several rows that are far from each other may name one line, and each reads it. A slice of all
// lines has so many bytes, so that it stays in the L2 cache meanwhile, beside codes on their way.
inline constexpr int64_t kSliceBytes = int64_t{12} << 20;

inline uint32_t SpansOfSlice(const QuantizeParams& p, int64_t element_bytes) {
  const int64_t spans = kSliceBytes / (p.x_lines * kSpan * element_bytes);
  return static_cast<uint32_t>(std::clamp<int64_t>(spans, 1, CeilDiv(p.columns, kSpan)));
}

// Elements of a thread: eight neighbouring rows of eight neighbouring columns.
template <DType kOf>
using Patch = Eight<kOf>[8];

// Where a thread block is, which has one span or two beside each other, and where a thread is.
// Eight lanes have a span's columns, four have 32 rows.
template <DType kOf, int kSpans>
struct TilePlace {
  int64_t tile, column;  // tile of 128 rows; first column
  TileRows rows;         // of x
  int thread, span;      // of a span

  // Thread blocks of all columns come before those of the next rows. Sliced, those of all rows come
  // before the next slice of columns.
  __device__ explicit TilePlace(const QuantizeParams& p, bool sliced = false)
      : thread(threadIdx.x % kSpanThreads), span(threadIdx.x / kSpanThreads) {
    const auto across = static_cast<uint32_t>(CeilDiv(p.columns, kSpans * kSpan));
    uint32_t first = 0, count = across, rest = blockIdx.x;  // spans of the slice
    if (sliced) {
      const uint32_t of_slice = p.slice * static_cast<uint32_t>(p.blocks);
      first = rest / of_slice * p.slice;
      rest %= of_slice;
      count = min(p.slice, across - first);
    }
    tile = rest / count;
    column = int64_t{first + rest % count} * (kSpans * kSpan);
    if (p.groups != nullptr) {
      rows = p.groups[tile];
    } else {
      const int64_t left = p.rows - kBlock * tile;
      rows = {static_cast<int32_t>(kBlock * tile),
              static_cast<int32_t>(min(int64_t{kBlock}, left))};
    }
  }

  __device__ int row() const { return thread / 8 * 8; }
  __device__ int column_of_span() const { return thread % 8 * 8; }
  __device__ int64_t own_column() const { return column + kSpan * span + column_of_span(); }

  // kByList: rows come by list.
  template <bool kByList>
  __device__ void Load(const QuantizeParams& p, int64_t m, Patch<kOf>& x) const {
    const int64_t pitch = p.columns * kElementBytes<kOf>;
    const uint8_t* from = p.x + own_column() * kElementBytes<kOf>;
    if constexpr (!kByList) from += (m * p.rows + rows.first + row()) * pitch;
    const int count = own_column() < p.columns ? rows.count - row() : 0;
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      if constexpr (kByList) {
        const int64_t line = i < count ? __ldg(p.list + rows.first + row() + i) : -1;
        x[i] = LoadEight<kOf>(from + line * pitch, line >= 0 && line < p.x_lines);
      } else {
        x[i] = LoadEight<kOf>(from, i < count);
        from += pitch;
      }
    }
  }
};

// The codes of a span on their way to lines of 128 bytes. Eight rows of a column are half a piece
// of 16 bytes. Pieces are swapped so that neither writes nor reads have bank conflicts.
struct TransposedCodes {
  uint4 pieces[kSpan][kBlock / 16];

  __device__ static int Place(int column, int piece) { return piece ^ (column / 8 % 8); }

  // Column i of a thread's eight.
  __device__ void Put(int thread, int i, uint2 codes) {
    const int column = thread % 8 * 8 + i, half = thread / 8;
    reinterpret_cast<uint2*>(&pieces[column][Place(column, half / 2)])[half % 2] = codes;
  }

  // Writes to lines `first`, ... of the result, of which `left` exist, from element `along` on.
  // kStreams: the L2 cache is for something else.
  template <bool kStreams = false>
  __device__ void Write(const QuantizeParams& p, int thread, int64_t first, int64_t left,
                        int64_t along) const {
    constexpr int kStep = kSpanThreads / 8;
    const int piece = thread % 8;
    if (along + 16 * piece >= p.along) return;
    uint8_t* to = p.codes + (first + thread / 8) * p.along + along + 16 * piece;
    JGG_UNROLL
    for (int i = 0; i < kSpan / kStep; ++i) {
      const int column = thread / 8 + i * kStep;
      if (column < left) {
        const uint4 codes = pieces[column][Place(column, piece)];
        if constexpr (kStreams) __stcs(reinterpret_cast<uint4*>(to), codes);
        if constexpr (!kStreams) *reinterpret_cast<uint4*>(to) = codes;
      }
      to += kStep * p.along;
    }
  }
};

// A block's scale, and the reciprocal of its divisor.
template <bool kSplit>
struct SharedScale {
  float value, reciprocal;

  __device__ static SharedScale Of(float scale) { return {scale, MakeDivisor(scale).reciprocal}; }
};

template <>
struct SharedScale<true> : SplitReciprocal {
  __device__ static SharedScale Of(float scale) { return {MakeSplitReciprocal(scale)}; }
};

// Codes of a thread's columns, put(i, codes) for each; scale(i): of column i.
template <Element kElement, bool kStochastic, DType kOf, bool kSplit = kSplits<kOf, kStochastic>,
          typename Scale, typename Put>
__device__ void EncodeColumns(const QuantizeParams& p, const Patch<kOf>& x, int64_t line,
                              int64_t along, Scale scale, Put put) {
  bool lifts = false;
  if constexpr (!kSplit) {
    float least = scale(0).value;
    JGG_UNROLL
    for (int i = 1; i < 8; ++i) least = fminf(least, scale(i).value);
    lifts = jgg::device::AnyLane(IsSmall(least));
  }
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const SharedScale<kSplit> of = scale(i);
    float values[8];
    JGG_UNROLL
    for (int j = 0; j < 8; ++j) values[j] = x[j][i];
    if constexpr (kSplit) {
      put(i, EncodeSplit8<kElement>(values, of));
    } else {
      put(i, EncodeEight<kElement, kStochastic>(p, values, of.value, of.reciprocal, lifts,
                                                RandomOfLine(p, line + i), along));
    }
  }
}

// ---- blocks along rows ----

template <DType kOf, bool kStochastic>
struct ColumnsShared {
  static constexpr int kWords = Eight<kOf>::kWords;
  uint4 largest[kSpanWarps][8][kWords / 4];  // of eight columns each
  SharedScale<kSplits<kOf, kStochastic>> scales[kSpan];
  TransposedCodes codes;
};

// The largest magnitudes of a lane's eight columns, in its warp. kAcross neighbouring lanes have
// other columns, and the others more rows of these.
template <DType kOf, int kAcross>
__device__ void LargestOfColumns(const Patch<kOf>& x, uint32_t (&largest)[Eight<kOf>::kWords]) {
  using Magnitude = Magnitudes<kOf>;
  JGG_UNROLL
  for (int i = 0; i < Eight<kOf>::kWords; ++i) {
    largest[i] = Magnitude::Of(x[0].words[i]);
    JGG_UNROLL
    for (int j = 1; j < 8; ++j) {
      largest[i] = Magnitude::Larger(largest[i], Magnitude::Of(x[j].words[i]));
    }
    largest[i] = Magnitude::template Share<kAcross, 32>(largest[i]);
  }
}

// That of one column, from what each warp found.
template <DType kOf, typename Words, int kWarps>
__device__ float LargestOfColumn(const Words (&of_warps)[kWarps], int column) {
  constexpr int kPer = 8 / Eight<kOf>::kWords;
  uint32_t all = 0;
  JGG_UNROLL
  for (int i = 0; i < kWarps; ++i) {
    const auto* words = reinterpret_cast<const uint32_t*>(of_warps[i]);
    all = Magnitudes<kOf>::Larger(all, words[column / kPer]);
  }
  return Magnitudes<kOf>::Value(all, column % kPer);
}

// Writes scales of a span's columns to shared memory, and those that exist to the result.
template <DType kOf, Element kElement, bool kStochastic>
__device__ void ScalesOfColumns(const QuantizeParams& p, const Patch<kOf>& x, int64_t line,
                                int64_t left, int64_t tile,
                                ColumnsShared<kOf, kStochastic>& shared) {
  constexpr int kWords = Eight<kOf>::kWords;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t largest[kWords];
  LargestOfColumns<kOf, 8>(x, largest);
  if (lane < 8) {
    JGG_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      shared.largest[warp][lane][i] =
          make_uint4(largest[4 * i], largest[4 * i + 1], largest[4 * i + 2], largest[4 * i + 3]);
    }
  }
  __syncthreads();
  if (threadIdx.x < kSpan) {
    const int column = threadIdx.x;
    const float scale =
        MakeScale<kElement>(LargestOfColumn<kOf>(shared.largest, column), p.power_of_two);
    shared.scales[column] = SharedScale<kSplits<kOf, kStochastic>>::Of(scale);
    if (column < left) p.scales[(line + column) * p.blocks + tile] = scale;
  }
  __syncthreads();
}

template <DType kOf, Element kElement, bool kStochastic, bool kByList>
__global__ void __launch_bounds__(kSpanThreads)
    ColumnsKernel(const __grid_constant__ QuantizeParams p) {
  __shared__ ColumnsShared<kOf, kStochastic> shared;
  const TilePlace<kOf, 1> at(p, kByList);
  if (kByList && at.rows.count == 0) return;  // of no group: nobody reads it
  const int64_t along = kBlock * at.tile, left = p.columns - at.column;
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    const int64_t line = m * p.columns + at.column;
    Patch<kOf> x;
    at.template Load<kByList>(p, m, x);
    ScalesOfColumns<kOf, kElement, kStochastic>(p, x, line, left, at.tile, shared);
    const auto* scales = shared.scales + at.column_of_span();
    EncodeColumns<kElement, kStochastic, kOf>(
        p, x, line + at.column_of_span(), along + at.row(), [&](int i) { return scales[i]; },
        [&](int i, uint2 codes) { shared.codes.Put(at.thread, i, codes); });
    __syncthreads();
    shared.codes.template Write<kByList>(p, at.thread, line, left, along);
  }
}

// ---- blocks of 128 x 128 ----

inline constexpr int kSquareThreads = 2 * kSpanThreads;

// The largest magnitude of all threads' elements.
template <DType kOf>
__device__ float LargestOfBlock(const Patch<kOf>& x, uint32_t (&shared)[kSquareThreads / 32]) {
  using Magnitude = Magnitudes<kOf>;
  uint32_t largest = LargestOf<kOf>(x[0]);
  JGG_UNROLL
  for (int i = 1; i < 8; ++i) largest = Magnitude::Larger(largest, LargestOf<kOf>(x[i]));
  // Magnitudes order as their bits do, and NaN is the largest.
  const uint32_t bits = __reduce_max_sync(0xffffffffu, AsBits(Magnitude::Largest(largest)));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
  __syncthreads();
  uint32_t all = shared[0];
  JGG_UNROLL
  for (int i = 1; i < kSquareThreads / 32; ++i) all = max(all, shared[i]);
  return AsFloat(all);
}

template <DType kOf, Element kElement, bool kStochastic, bool kTransposed>
__global__ void __launch_bounds__(kSquareThreads)
    SquaresKernel(const __grid_constant__ QuantizeParams p) {
  __shared__ uint32_t largest[kSquareThreads / 32];
  __shared__ TransposedCodes transposed[kTransposed ? 2 : 1];
  const TilePlace<kOf, 2> at(p);
  const int64_t block = at.column / kBlock;  // along C
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    Patch<kOf> x;
    at.template Load<false>(p, m, x);
    const float scale = MakeScale<kElement>(LargestOfBlock<kOf>(x, largest), p.power_of_two);
    if constexpr (!kTransposed) {
      if (threadIdx.x == 0) {
        p.scales[(m * CeilDiv(p.rows, kBlock) + at.tile) * p.blocks + block] = scale;
      }
      JGG_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int64_t line = m * p.rows + at.rows.first + at.row() + i;
        const uint2 codes =
            EncodeRow<kElement, kStochastic, kOf>(p, x[i], scale, line, at.own_column());
        if (at.row() + i >= at.rows.count || at.own_column() >= p.columns) continue;
        *reinterpret_cast<uint2*>(p.codes + line * p.columns + at.own_column()) = codes;
      }
      __syncthreads();  // before the next matrix' largest magnitudes
    } else {
      if (threadIdx.x == 0) {
        p.scales[(m * CeilDiv(p.columns, kBlock) + block) * p.blocks + at.tile] = scale;
      }
      const int64_t along = kBlock * at.tile;
      const auto one = SharedScale<kSplits<kOf, kStochastic>>::Of(scale);
      EncodeColumns<kElement, kStochastic, kOf>(
          p, x, m * p.columns + at.own_column(), along + at.row(), [&](int) { return one; },
          [&](int i, uint2 codes) { transposed[at.span].Put(at.thread, i, codes); });
      __syncthreads();
      const int64_t first = at.column + kSpan * at.span;
      transposed[at.span].Write(p, at.thread, m * p.columns + first, p.columns - first, along);
    }
  }
}

}  // namespace jgg::fp8::device

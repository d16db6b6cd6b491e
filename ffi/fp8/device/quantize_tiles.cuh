// The kernels of fp8_quantize that read x (M, R, C) in tiles of 128 rows: blocks of 128 along R,
// which may be grouped, stored transposed; blocks of 128 x 128, stored as x is or transposed.
#pragma once

#include "fp8/device/quantize.cuh"

namespace jgg::fp8::device {

enum class Tile { kColumns, kSquare, kSquareTransposed };

inline constexpr int kTileThreads = 256;
inline constexpr int kWarps = kTileThreads / 32;
inline constexpr int kSpan = 64;  // columns that a thread block reads at once

// Spans of a tile.
template <Tile kTile>
inline constexpr int kSpans = kTile == Tile::kColumns ? 1 : kBlock / kSpan;

template <Tile kTile>
int64_t TileRowsCount(const QuantizeParams& p) {
  return kTile == Tile::kColumns ? p.blocks : CeilDiv(p.rows, kBlock);
}

// Thread blocks for a matrix.
template <Tile kTile>
int64_t TilesBlocks(const QuantizeParams& p) {
  return TileRowsCount<kTile>(p) * CeilDiv(p.columns, kSpans<kTile> * kSpan);
}

// Where a thread block is, and a thread: it has four neighbouring rows, and of each span eight
// neighbouring columns. Eight lanes have a span's columns, four have 16 rows.
template <DType kOf, Tile kTile>
struct TilePlace {
  int64_t tile, column;  // tile of 128 rows; first column
  TileRows rows;         // of x
  int warp, lane;

  __device__ explicit TilePlace(const QuantizeParams& p)
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    const auto across = static_cast<uint32_t>(CeilDiv(p.columns, kSpans<kTile> * kSpan));
    tile = blockIdx.x / across;
    column = int64_t{blockIdx.x % across} * (kSpans<kTile> * kSpan);
    if (p.groups != nullptr) {
      rows = p.groups[tile];
    } else {
      const int64_t left = p.rows - kBlock * tile;
      rows = {static_cast<int32_t>(kBlock * tile),
              static_cast<int32_t>(min(int64_t{kBlock}, left))};
    }
  }

  __device__ int row() const { return 16 * warp + lane / 8 * 4; }
  __device__ int columns_of(int span) const { return kSpan * span + lane % 8 * 8; }

  __device__ void Load(const QuantizeParams& p, int64_t m,
                       Eight<kOf> (&x)[kSpans<kTile>][4]) const {
    const int64_t pitch = p.columns * kElementBytes<kOf>, first = column + lane % 8 * 8;
    const uint8_t* from =
        p.x + (m * p.rows + rows.first + row()) * pitch + first * kElementBytes<kOf>;
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      JGG_UNROLL
      for (int span = 0; span < kSpans<kTile>; ++span) {
        x[span][i] = LoadEight<kOf>(from + span * (kSpan * kElementBytes<kOf>),
                                    row() + i < rows.count && first + kSpan * span < p.columns);
      }
      from += pitch;
    }
  }
};

// The codes of a span on their way to lines of 128 bytes: four rows of a column are a word. Pieces
// of 16 bytes are exchanged so that neither writing nor reading has conflicts of banks.
struct TransposedCodes {
  uint4 pieces[kSpan][kBlock / 16];

  __device__ static int Place(int column, int piece) { return piece ^ (column / 8 % 8); }

  // The column of this thread's eight.
  __device__ void Put(int warp, int lane, int i, uint32_t four) {
    const int column = lane % 8 * 8 + i;
    reinterpret_cast<uint32_t*>(&pieces[column][Place(column, warp)])[lane / 8] = four;
  }

  // To lines `first`, ... of the result, of which `left` exist, from element `along` on.
  __device__ void Write(const QuantizeParams& p, int64_t first, int64_t left, int64_t along) const {
    const int piece = threadIdx.x % 8;
    if (along + 16 * piece >= p.along) return;
    constexpr int kStep = kTileThreads / 8;
    uint8_t* to = p.codes + (first + threadIdx.x / 8) * p.along + along + 16 * piece;
    JGG_UNROLL
    for (int i = 0; i < kSpan / kStep; ++i) {
      const int column = threadIdx.x / 8 + i * kStep;
      if (column < left) *reinterpret_cast<uint4*>(to) = pieces[column][Place(column, piece)];
      to += kStep * p.along;
    }
  }
};

// Random numbers for a thread's four rows of columns `which` and `which` + 4 of its eight. Of a
// block of 16 rows, lanes 8 apart have neighbouring fours, which one set of eight numbers serves.
// Each lane makes that of one column.
__device__ inline void RandomOfTwo(const QuantizeParams& p, int64_t line, int64_t along, int which,
                                   uint32_t (&random)[2][2]) {
  const bool later = threadIdx.x / 8 % 2;
  const int64_t own = line + which + (later ? 4 : 0);
  const RandomBits bits(own * CeilDiv(p.along, 16) + along / 16, along / 8 % 2, __ldg(p.seed),
                        __ldg(p.seed + 1));
  JGG_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = bits.words[i], second = bits.words[2 + i];
    const uint32_t other = __shfl_xor_sync(0xffffffffu, later ? first : second, 8);
    random[0][i] = later ? other : first;
    random[1][i] = later ? second : other;
  }
}

// Codes of a thread's rows of a span, a word for each column: put(i, word). scale(i): of column i.
template <Element kElement, bool kStochastic, DType kOf, typename Scale, typename Put>
__device__ void EncodeColumns(const QuantizeParams& p, const Eight<kOf> (&x)[4], int64_t line,
                              int64_t along, Scale scale, Put put) {
  float least = scale(0).value;
  JGG_UNROLL
  for (int i = 1; i < 8; ++i) least = fminf(least, scale(i).value);
  const bool lifts = jgg::device::AnyLane(IsSmall(least));
  JGG_UNROLL
  for (int which = 0; which < 4; ++which) {
    uint32_t random[2][2] = {};
    if constexpr (kStochastic) RandomOfTwo(p, line, along, which, random);
    JGG_UNROLL
    for (int other = 0; other < 2; ++other) {
      const int i = which + 4 * other;
      const auto of = scale(i);
      float four[4];
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) four[j] = x[j][i];
      Divisor divisor{of.value, of.reciprocal};
      if (lifts) {
        const float lift = IsSmall(of.value) ? kLift : 1.0f;
        divisor.value = Multiply(of.value, lift);
        JGG_UNROLL
        for (int j = 0; j < 4; ++j) four[j] = Multiply(four[j], lift);
      }
      put(i, Encode4<kElement, kStochastic>(four, divisor, IsDead(of.value), random[other]));
    }
  }
}

// ---- blocks along rows ----

// The scale of a block, and its divisor's reciprocal.
struct ColumnScale {
  float value, reciprocal;
};

template <DType kOf>
struct ColumnsShared {
  static constexpr int kWords = Eight<kOf>::kWords;
  uint4 largest[kWarps][8][kWords / 4];  // of eight columns each
  ColumnScale scales[kSpan];
  TransposedCodes codes;
};

// Scales of a span's columns, to shared memory, and to the result those that exist.
template <DType kOf, Element kElement>
__device__ void ScalesOfColumns(const QuantizeParams& p, const Eight<kOf> (&x)[4], int64_t line,
                                int64_t left, int64_t tile, ColumnsShared<kOf>& shared) {
  using Magnitude = Magnitudes<kOf>;
  constexpr int kWords = Eight<kOf>::kWords, kPer = 8 / kWords;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t largest[kWords];
  JGG_UNROLL
  for (int i = 0; i < kWords; ++i) {
    largest[i] = Magnitude::Of(x[0].words[i]);
    JGG_UNROLL
    for (int j = 1; j < 4; ++j) {
      largest[i] = Magnitude::Larger(largest[i], Magnitude::Of(x[j].words[i]));
    }
    largest[i] = Magnitude::template Share<8, 32>(largest[i]);
  }
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
    uint32_t all = 0;
    JGG_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      const auto* words = reinterpret_cast<const uint32_t*>(shared.largest[i]);
      all = Magnitude::Larger(all, words[column / kPer]);
    }
    const float scale = MakeScale<kElement>(Magnitude::Value(all, column % kPer), p.power_of_two);
    shared.scales[column] = {scale, MakeDivisor(scale).reciprocal};
    if (column < left) p.scales[(line + column) * p.blocks + tile] = scale;
  }
  __syncthreads();
}

template <DType kOf, Element kElement, bool kStochastic>
__global__ void __launch_bounds__(kTileThreads)
    ColumnsKernel(const __grid_constant__ QuantizeParams p) {
  __shared__ ColumnsShared<kOf> shared;
  const TilePlace<kOf, Tile::kColumns> at(p);
  const int64_t along = kBlock * at.tile, left = p.columns - at.column;
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    const int64_t line = m * p.columns + at.column;
    Eight<kOf> x[1][4];
    at.Load(p, m, x);
    ScalesOfColumns<kOf, kElement>(p, x[0], line, left, at.tile, shared);
    const ColumnScale* scales = shared.scales + at.columns_of(0);
    EncodeColumns<kElement, kStochastic, kOf>(
        p, x[0], line + at.columns_of(0), along + at.row(), [&](int i) { return scales[i]; },
        [&](int i, uint32_t four) { shared.codes.Put(at.warp, at.lane, i, four); });
    __syncthreads();
    shared.codes.Write(p, line, left, along);
  }
}

// ---- blocks of 128 x 128 ----

// The largest magnitude of all threads' elements.
template <DType kOf>
__device__ float LargestOfBlock(const Eight<kOf> (&x)[2][4], uint32_t (&shared)[kWarps]) {
  using Magnitude = Magnitudes<kOf>;
  uint32_t largest = 0;
  JGG_UNROLL
  for (int span = 0; span < 2; ++span) {
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) largest = Magnitude::Larger(largest, LargestOf<kOf>(x[span][i]));
  }
  // As numbers magnitudes order as their bits do, and NaN is the largest.
  const uint32_t bits = __reduce_max_sync(0xffffffffu, AsBits(Magnitude::Largest(largest)));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
  __syncthreads();
  uint32_t all = shared[0];
  JGG_UNROLL
  for (int i = 1; i < kWarps; ++i) all = max(all, shared[i]);
  return AsFloat(all);
}

template <DType kOf, Element kElement, bool kStochastic, bool kTransposed>
__global__ void __launch_bounds__(kTileThreads)
    SquaresKernel(const __grid_constant__ QuantizeParams p) {
  constexpr Tile kTile = kTransposed ? Tile::kSquareTransposed : Tile::kSquare;
  __shared__ uint32_t largest[kWarps];
  __shared__ TransposedCodes transposed[kTransposed ? 2 : 1];
  const TilePlace<kOf, kTile> at(p);
  const int64_t block = at.column / kBlock;  // along C
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    Eight<kOf> x[2][4];
    at.Load(p, m, x);
    const float scale = MakeScale<kElement>(LargestOfBlock<kOf>(x, largest), p.power_of_two);
    if constexpr (!kTransposed) {
      if (threadIdx.x == 0) {
        p.scales[(m * CeilDiv(p.rows, kBlock) + at.tile) * p.blocks + block] = scale;
      }
      JGG_UNROLL
      for (int span = 0; span < 2; ++span) {
        const int64_t column = at.column + at.columns_of(span);
        JGG_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int64_t line = m * p.rows + at.rows.first + at.row() + i;
          const uint2 codes =
              EncodeEight<kElement, kStochastic, kOf>(p, x[span][i], scale, line, column);
          if (at.row() + i >= at.rows.count || column >= p.columns) continue;
          *reinterpret_cast<uint2*>(p.codes + line * p.columns + column) = codes;
        }
      }
      __syncthreads();  // before the next matrix' largest magnitudes
    } else {
      if (threadIdx.x == 0) {
        p.scales[(m * CeilDiv(p.columns, kBlock) + block) * p.blocks + at.tile] = scale;
      }
      const int64_t along = kBlock * at.tile;
      const ColumnScale one{scale, MakeDivisor(scale).reciprocal};
      JGG_UNROLL
      for (int span = 0; span < 2; ++span) {
        EncodeColumns<kElement, kStochastic, kOf>(
            p, x[span], m * p.columns + at.column + at.columns_of(span), along + at.row(),
            [&](int) { return one; },
            [&](int i, uint32_t four) { transposed[span].Put(at.warp, at.lane, i, four); });
      }
      __syncthreads();
      JGG_UNROLL
      for (int span = 0; span < 2; ++span) {
        const int64_t first = at.column + kSpan * span;
        transposed[span].Write(p, m * p.columns + first, p.columns - first, along);
      }
    }
  }
}

}  // namespace jgg::fp8::device

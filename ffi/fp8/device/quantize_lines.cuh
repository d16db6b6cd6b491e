// The kernel of fp8_quantize_lines: x (R, C), R in groups, to codes in blocks of 128 along C,
// stored as x is, and in blocks of 128 along R, stored transposed, from one read of x. C is a
// multiple of 8.
#pragma once

#include "fp8/device/quantize_both.cuh"

namespace jgg::fp8::device {

struct LinesParams {
  QuantizeParams by_rows;     // blocks along C; x, rows and columns are of this one
  QuantizeParams by_columns;  // blocks along R, with the groups of each tile
};

// Thread blocks, of a tile of 128 x 128 each. A thread has eight rows of eight columns, sixteen
// lanes have a row.
inline int64_t LinesBlocks(const LinesParams& p) { return p.by_columns.blocks * p.by_rows.blocks; }

template <DType kOf, bool kStochastic>
struct LinesShared {
  using Scale = SharedScale<kSplits<kOf, kStochastic>>;
  static constexpr int kWords = Eight<kOf>::kWords;
  uint4 largest[kSquareThreads / 32][kAcross][kWords / 4];  // of eight columns each
  Scale rows[kBlock];
  Scale columns[4][kAcross][2];  // in the order in which neighbouring lanes read them
  TurnedBlock codes;
};

struct LinesPlace {
  TileRows rows;    // of x
  int tile, block;  // of 128 padded rows, of 128 columns
  int part, eight;  // eight columns, and eight rows, of those

  __device__ explicit LinesPlace(const LinesParams& p)
      : part(threadIdx.x % kAcross), eight(threadIdx.x / kAcross) {
    const auto across = static_cast<uint32_t>(p.by_rows.blocks);
    tile = static_cast<int>(blockIdx.x / across);
    block = static_cast<int>(blockIdx.x % across);
    rows = p.by_columns.groups[tile];
  }

  __device__ int column() const { return kBlock * block + 8 * part; }
  __device__ int line(int i) const { return rows.first + 8 * eight + i; }
  // How many of a thread's rows exist.
  __device__ int count(const LinesParams& p) const {
    return column() < p.by_rows.columns ? rows.count - 8 * eight : 0;
  }
};

// Scales of rows, to shared memory and to the result.
template <DType kOf, bool kStochastic>
__device__ void ScalesOfRows(const LinesParams& p, const LinesPlace& at, const Patch<kOf>& x,
                             LinesShared<kOf, kStochastic>& shared) {
  using Magnitude = Magnitudes<kOf>;
  constexpr int kRows = kOf == DType::kF32 ? 1 : 2;  // to a word
  const int own = at.part % 8;                       // row of a lane; two lanes have the same
  float largest = 0.0f;
  JGG_UNROLL
  for (int i = 0; i < 8; i += kRows) {
    uint32_t of_rows = LargestOf<kOf>(x[i]);
    if constexpr (kRows == 2) {
      const uint32_t next = LargestOf<kOf>(x[i + 1]);
      of_rows = Magnitude::Larger(Permute(of_rows, next, 0x5410), Permute(of_rows, next, 0x7632));
    }
    of_rows = Magnitude::template Share<1, kAcross>(of_rows);
    if (own / kRows == i / kRows) largest = Magnitude::Value(of_rows, own % kRows);
  }
  const float scale = MakeScale<Element::kE4M3>(largest, false);
  if (at.part >= 8) return;
  shared.rows[8 * at.eight + own] = LinesShared<kOf, kStochastic>::Scale::Of(scale);
  if (8 * at.eight + own < at.rows.count) {
    p.by_rows.scales[int64_t{at.line(own)} * p.by_rows.blocks + at.block] = scale;
  }
}

// Scales of columns, likewise; all threads have both after it.
template <DType kOf, bool kStochastic>
__device__ void ScalesOfColumns(const LinesParams& p, const LinesPlace& at, const Patch<kOf>& x,
                                LinesShared<kOf, kStochastic>& shared) {
  using Magnitude = Magnitudes<kOf>;
  constexpr int kWords = Eight<kOf>::kWords, kPer = 8 / kWords;
  const int warp = threadIdx.x / 32;
  uint32_t largest[kWords];
  JGG_UNROLL
  for (int i = 0; i < kWords; ++i) {
    largest[i] = Magnitude::Of(x[0].words[i]);
    JGG_UNROLL
    for (int j = 1; j < 8; ++j) {
      largest[i] = Magnitude::Larger(largest[i], Magnitude::Of(x[j].words[i]));
    }
    largest[i] = Magnitude::template Share<kAcross, 32>(largest[i]);
  }
  if (threadIdx.x % 32 < kAcross) {
    JGG_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      shared.largest[warp][at.part][i] =
          make_uint4(largest[4 * i], largest[4 * i + 1], largest[4 * i + 2], largest[4 * i + 3]);
    }
  }
  __syncthreads();
  if (threadIdx.x < kBlock) {
    const int column = threadIdx.x;
    uint32_t all = 0;
    JGG_UNROLL
    for (int i = 0; i < kSquareThreads / 32; ++i) {
      const auto* words = reinterpret_cast<const uint32_t*>(shared.largest[i]);
      all = Magnitude::Larger(all, words[column / kPer]);
    }
    const float scale = MakeScale<Element::kE4M3>(Magnitude::Value(all, column % kPer), false);
    shared.columns[column % 8 / 2][column / 8][column % 2] =
        LinesShared<kOf, kStochastic>::Scale::Of(scale);
    const int64_t line = kBlock * at.block + column;
    if (line < p.by_rows.columns) p.by_columns.scales[line * p.by_columns.blocks + at.tile] = scale;
  }
  __syncthreads();
}

template <DType kOf, bool kStochastic>
__global__ void __launch_bounds__(kSquareThreads, kOf == DType::kF32 ? 1 : 2)
    LinesKernel(const __grid_constant__ LinesParams p) {
  constexpr Element kElement = Element::kE4M3;
  __shared__ LinesShared<kOf, kStochastic> shared;
  const LinesPlace at(p);
  if (at.rows.count == 0) return;  // of no group: nobody reads it
  const int64_t columns = p.by_rows.columns;
  const int64_t first = int64_t{at.line(0)} * columns + at.column();
  const int count = at.count(p);
  const uint8_t* from = p.by_rows.x + first * kElementBytes<kOf>;
  Patch<kOf> x;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = LoadEight<kOf>(from, i < count);
    from += columns * kElementBytes<kOf>;
  }
  ScalesOfRows<kOf, kStochastic>(p, at, x, shared);
  ScalesOfColumns<kOf, kStochastic>(p, at, x, shared);
  uint8_t* to = p.by_rows.codes + first;
  uint64_t random = RandomOfLine(p.by_rows, at.line(0));
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const auto scale = shared.rows[8 * at.eight + i];
    float values[8];
    JGG_UNROLL
    for (int j = 0; j < 8; ++j) values[j] = x[i][j];
    uint2 codes;
    if constexpr (kSplits<kOf, kStochastic>) {
      codes = EncodeSplit8<kElement>(values, scale);
    } else {
      codes = EncodeEight<kElement, kStochastic>(p.by_rows, values, scale.value, scale.reciprocal,
                                                 jgg::device::AnyLane(IsSmall(scale.value)), random,
                                                 at.column());
    }
    if (i < count) *reinterpret_cast<uint2*>(to) = codes;
    to += columns;
    random += RandomOfLine(p.by_rows, 1);
  }
  EncodeColumns<kElement, kStochastic, kOf>(
      p.by_columns, x, at.column(), kBlock * int64_t{at.tile} + 8 * at.eight,
      [&](int i) { return shared.columns[i / 2][at.part][i % 2]; },
      [&](int i, uint2 codes) { shared.codes.HalfPiece(8 * at.part + i, at.eight) = codes; });
  __syncthreads();
  const int64_t along = p.by_columns.along, line = kBlock * at.block;
  shared.codes.Write(p.by_columns.codes + line * along + kBlock * int64_t{at.tile}, along,
                     columns - line, kBlock);
}

}  // namespace jgg::fp8::device

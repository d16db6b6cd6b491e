// The kernel of fp8_quantize along both axes: x (R, C), R in groups, to codes in blocks of 128
// along C, stored as x is, and in blocks of 128 along R, stored transposed, from one read of x.
// Elements have 16 bits, codes are rounded to nearest, and C is a multiple of 16.
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

struct LinesShared {
  uint4 largest[kSquareThreads / 32][kAcross];  // of eight columns each
  SplitReciprocal rows[kBlock];
  SplitReciprocal columns[4][kAcross][2];  // in the order in which neighbouring lanes read them
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

// Rows of no group become zeros. Of those behind all groups each tile has 128.
__device__ inline void ClearRest(const LinesParams& p, const LinesPlace& at) {
  const QuantizeParams& to = p.by_rows;
  const int64_t begin = *p.by_columns.inside + int64_t{kBlock} * at.tile + at.eight;
  const int64_t end = min(begin - at.eight + kBlock, to.rows);
  JGG_NO_UNROLL
  for (int64_t line = begin; line < end; line += kSquareThreads / kAcross) {
    if (at.column() < to.columns) {
      *reinterpret_cast<uint2*>(to.codes + line * to.columns + at.column()) = make_uint2(0, 0);
    }
    if (at.part == 0) to.scales[line * to.blocks + at.block] = 1.0f;
  }
}

// The columns of a tile that no group has become zeros.
__device__ inline void ClearColumns(const LinesParams& p, const LinesPlace& at) {
  const QuantizeParams& to = p.by_columns;
  JGG_NO_UNROLL
  for (int i = threadIdx.x; i < kBlock * kBlock / 16; i += kSquareThreads) {
    const int64_t line = kBlock * at.block + i / 8;
    if (line >= p.by_rows.columns) return;
    uint8_t* codes = to.codes + line * to.along + int64_t{kBlock} * at.tile;
    reinterpret_cast<uint4*>(codes)[i % 8] = make_uint4(0, 0, 0, 0);
    if (i % 8 == 0) to.scales[line * to.blocks + at.tile] = 1.0f;
  }
}

// Writes scales of rows to shared memory and to the result.
template <DType kOf>
__device__ void ScalesOfRows(const LinesParams& p, const LinesPlace& at, const Patch<kOf>& x,
                             LinesShared& shared) {
  using Magnitude = Magnitudes<kOf>;
  const int own = at.part % 8;  // row of a lane; two lanes have the same
  float largest = 0.0f;
  JGG_UNROLL
  for (int i = 0; i < 8; i += 2) {  // two rows to a word
    const uint32_t first = LargestOf<kOf>(x[i]), second = LargestOf<kOf>(x[i + 1]);
    const uint32_t both =
        Magnitude::Larger(Permute(first, second, 0x5410), Permute(first, second, 0x7632));
    const uint32_t of_rows = Magnitude::template Share<1, kAcross>(both);
    if (own / 2 == i / 2) largest = Magnitude::Value(of_rows, own % 2);
  }
  const float scale = MakeScale<Element::kE4M3>(largest, false);
  if (at.part >= 8) return;
  shared.rows[8 * at.eight + own] = MakeSplitReciprocal(scale);
  if (8 * at.eight + own < at.rows.count) {
    p.by_rows.scales[int64_t{at.line(own)} * p.by_rows.blocks + at.block] = scale;
  }
}

// The same for scales of columns. After it all threads have both.
template <DType kOf>
__device__ void ScalesOfColumns(const LinesParams& p, const LinesPlace& at, const Patch<kOf>& x,
                                LinesShared& shared) {
  uint32_t largest[4];
  LargestOfColumns<kOf, kAcross>(x, largest);
  if (threadIdx.x % 32 < kAcross) {
    shared.largest[threadIdx.x / 32][at.part] =
        make_uint4(largest[0], largest[1], largest[2], largest[3]);
  }
  __syncthreads();
  if (threadIdx.x < kBlock) {
    const int column = threadIdx.x;
    const float scale =
        MakeScale<Element::kE4M3>(LargestOfColumn<kOf>(shared.largest, column), false);
    shared.columns[column % 8 / 2][column / 8][column % 2] = MakeSplitReciprocal(scale);
    const int64_t line = kBlock * at.block + column;
    if (line < p.by_rows.columns) p.by_columns.scales[line * p.by_columns.blocks + at.tile] = scale;
  }
  __syncthreads();
}

// The compiler would keep elements as float32 from one use to the next, for which there are no
// registers.
template <DType kOf>
__device__ void Forget(Patch<kOf>& x) {
#ifdef __CUDA_ARCH__
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    JGG_UNROLL
    for (uint32_t& word : x[i].words) asm volatile("" : "+r"(word));
  }
#endif
}

// Thread blocks of a multiprocessor. Code for 10.0 needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kLinesAtOnce = 3;
#else
inline constexpr int kLinesAtOnce = 4;
#endif

template <DType kOf>
__global__ void __launch_bounds__(kSquareThreads, kLinesAtOnce)
    LinesKernel(const __grid_constant__ LinesParams p) {
  static_assert(kSplits<kOf, false>, "elements of 16 bits");
  constexpr Element kElement = Element::kE4M3;
  __shared__ LinesShared shared;
  const LinesPlace at(p);
  ClearRest(p, at);
  if (at.rows.count == 0) return ClearColumns(p, at);
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
  ScalesOfRows<kOf>(p, at, x, shared);
  ScalesOfColumns<kOf>(p, at, x, shared);
  const int odd = at.part % 2;
  uint8_t* to = p.by_rows.codes + first + (odd ? columns - 8 : 0);
  JGG_UNROLL
  for (int i = 0; i < 8; i += 2) {
    uint2 codes[2];
    JGG_UNROLL
    for (int k = 0; k < 2; ++k) {
      float values[8];
      JGG_UNROLL
      for (int j = 0; j < 8; ++j) values[j] = x[i + k][j];
      codes[k] = EncodeSplit8<kElement>(values, shared.rows[8 * at.eight + i + k]);
    }
    const uint4 sixteen = SixteenOfRow(codes[0], codes[1], odd);
    if (i + odd < count) *reinterpret_cast<uint4*>(to) = sixteen;
    to += 2 * columns;
  }
  Forget<kOf>(x);
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    float values[8];
    JGG_UNROLL
    for (int j = 0; j < 8; ++j) values[j] = x[j][i];
    shared.codes.HalfPiece(8 * at.part + i, at.eight) =
        EncodeSplit8<kElement>(values, shared.columns[i / 2][at.part][i % 2]);
  }
  __syncthreads();
  const int64_t along = p.by_columns.along, line = kBlock * at.block;
  shared.codes.Write(p.by_columns.codes + line * along + kBlock * int64_t{at.tile}, along,
                     columns - line, kBlock);
}

}  // namespace jgg::fp8::device

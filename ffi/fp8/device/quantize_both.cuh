// The kernel of fp8_quantize along both axes, of blocks of 128 x 128: x (M, R, C) to codes that are
// stored as x is and transposed, from one read of x. R and C are multiples of 16.
#pragma once

#include "fp8/device/quantize_tiles.cuh"

namespace jgg::fp8::device {

struct BothParams {
  QuantizeParams of;  // codes and scales of it are stored as x is
  uint8_t* turned;    // (M, C, R)
  float* turned_scales;
};

inline constexpr int kAcross = kBlock / 8;  // threads beside each other, of eight columns each

// Words of four rows, each of four columns' bytes, to words of four columns.
__device__ inline void TransposeBytes(uint32_t (&words)[4]) {
  const uint32_t low01 = Permute(words[0], words[1], 0x5140);
  const uint32_t high01 = Permute(words[0], words[1], 0x7362);
  const uint32_t low23 = Permute(words[2], words[3], 0x5140);
  const uint32_t high23 = Permute(words[2], words[3], 0x7362);
  words[0] = Permute(low01, low23, 0x5410);
  words[1] = Permute(low01, low23, 0x7632);
  words[2] = Permute(high01, high23, 0x5410);
  words[3] = Permute(high01, high23, 0x7632);
}

// The codes of a block on their way to transposed lines of 128 bytes. Eight rows of a column are
// half a piece of 16 bytes. Pieces, and the halves of each, are swapped so that neither writes nor
// reads have bank conflicts.
struct TurnedBlock {
  uint4 pieces[kBlock][kBlock / 16];

  // The codes of a column's eight rows from 8 * eight on.
  __device__ uint2& HalfPiece(int column, int eight) {
    const int part = column / 8, piece = eight / 2 ^ part % 8, half = eight % 2 ^ part / 8;
    return reinterpret_cast<uint2*>(&pieces[column][piece])[half];
  }

  // Codes of the thread with eight rows from 8 * eight on, and eight columns from 8 * part on.
  __device__ void Put(int part, int eight, const uint2 (&codes)[8]) {
    JGG_UNROLL
    for (int word = 0; word < 2; ++word) {  // four columns
      uint32_t upper[4], lower[4];
      JGG_UNROLL
      for (int i = 0; i < 4; ++i) {
        upper[i] = word ? codes[i].y : codes[i].x;
        lower[i] = word ? codes[4 + i].y : codes[4 + i].x;
      }
      TransposeBytes(upper);
      TransposeBytes(lower);
      JGG_UNROLL
      for (int i = 0; i < 4; ++i) {
        HalfPiece(8 * part + 4 * word + i, eight) = make_uint2(upper[i], lower[i]);
      }
    }
  }

  // Writes to so many lines from `to` on, `pitch` elements apart, of which `left` are to be
  // written.
  __device__ void Write(uint8_t* to, int64_t pitch, int64_t lines, int64_t left) const {
    constexpr int kStep = kSquareThreads / 8;
    const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
    if (16 * piece >= left) return;
    to += first * pitch + 16 * piece;
    JGG_UNROLL
    for (int i = 0; i < kBlock / kStep; ++i) {
      const int line = first + i * kStep;
      uint4 codes = pieces[line][piece ^ line / 8 % 8];
      if (i * kStep >= kBlock / 2) codes = make_uint4(codes.z, codes.w, codes.x, codes.y);
      if (line < lines) *reinterpret_cast<uint4*>(to) = codes;
      to += kStep * pitch;
    }
  }
};

// Two lanes swap codes of two rows of their eight columns, so that each has one row of sixteen: the
// even lane the first, the odd one the second.
__device__ inline uint4 SixteenOfRow(uint2 first, uint2 second, bool odd) {
  const uint2 give = odd ? first : second;
  const uint2 taken =
      make_uint2(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1));
  return odd ? make_uint4(taken.x, taken.y, second.x, second.y)
             : make_uint4(first.x, first.y, taken.x, taken.y);
}

template <DType kOf>
__global__ void __launch_bounds__(kSquareThreads, kOf == DType::kF32 ? 2 : 4)
    BothKernel(const __grid_constant__ BothParams both) {
  __shared__ uint32_t largest[kSquareThreads / 32];
  __shared__ TurnedBlock turned;
  const QuantizeParams& p = both.of;
  const auto across = static_cast<uint32_t>(CeilDiv(p.columns, kBlock));
  const int64_t tile = blockIdx.x / across, block = blockIdx.x % across;
  const int part = threadIdx.x % kAcross, eight = threadIdx.x / kAcross;
  const int64_t row = kBlock * tile + 8 * eight, column = kBlock * block + 8 * part;
  const bool exists = row < p.rows && column < p.columns, odd = part % 2;
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    const int64_t first = (m * p.rows + row) * p.columns + column;
    const uint8_t* from = p.x + first * kElementBytes<kOf>;
    Patch<kOf> x;
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      x[i] = LoadEight<kOf>(from, exists);
      from += p.columns * kElementBytes<kOf>;
    }
    const float scale = MakeScale<Element::kE4M3>(LargestOfBlock<kOf>(x, largest), false);
    if (threadIdx.x == 0) {
      p.scales[(m * CeilDiv(p.rows, kBlock) + tile) * across + block] = scale;
      both.turned_scales[(m * across + block) * CeilDiv(p.rows, kBlock) + tile] = scale;
    }
    const float reciprocal = MakeDivisor(scale).reciprocal;
    uint2 codes[8];
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      float values[8];
      JGG_UNROLL
      for (int j = 0; j < 8; ++j) values[j] = x[i][j];
      codes[i] =
          EncodeEight<Element::kE4M3, false>(p, values, scale, reciprocal, IsSmall(scale), 0, 0);
    }
    uint8_t* to = p.codes + first + (odd ? p.columns - 8 : 0);
    JGG_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const uint4 sixteen = SixteenOfRow(codes[i], codes[i + 1], odd);
      if (exists) *reinterpret_cast<uint4*>(to) = sixteen;
      to += 2 * p.columns;
    }
    turned.Put(part, eight, codes);
    __syncthreads();
    const int64_t line = m * p.columns + kBlock * block;
    turned.Write(both.turned + line * p.rows + kBlock * tile, p.rows, p.columns - kBlock * block,
                 p.rows - kBlock * tile);
  }
}

}  // namespace jgg::fp8::device

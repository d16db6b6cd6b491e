// Sums over k of few rows and an affine weight as it is stored, in float32: codes are multiplied as
// whole numbers, which bfloat16 holds, and scales multiply sums of the 32 k that share one.
//
// Thread j of a quad has 32 codes of every 128 k, from 32 * j on. One mma.sync adds up k of four
// threads, whose scales differ. So a row of x is four columns of the instruction, one for each
// thread's k, with zeros elsewhere. Columns 2 * j and 2 * j + 1, whose sums thread j has, are two
// rows of its own k. Plain C++ on the host, too (tests/lib/scaled_lines.cc).
#pragma once

#include <cstdint>

#include "quantized/device/line_tile.cuh"
#include "quantized/device/packed_format_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

// Rows of x of a tile. x has its columns in an order in which a thread's pairs of 128 k lie
// together (quantized/gemm_sm90.h).
constexpr int kScaledLinesRows = 8;

// A warp's product of 2 * kPairs rows and 16 columns. kAhead: for how many 128 k scales are loaded
// before they are needed. Quantized is QuantizedGemmSm90, or what has its members on the host.
template <typename Quantized, int kBits, int kPairs, PackedFloats kFloats, int kAhead>
class ScaledLinesProduct {
  using Tile = LineTile<kBits>;
  static constexpr bool kFloat32 = kFloats == PackedFloats::k32Bits;
  static constexpr int kScaleSize = kFloat32 ? 4 : 2;
  static_assert(kPairs % 2 == 0 && 2 * kPairs <= kScaledLinesRows);

 public:
  static constexpr int kEights = (kPairs + 3) / 4;       // of rows
  static constexpr int kSliceBytes = kEights * 8 * 128;  // of x, of 64 k

  // The warp's columns begin with `column`, of n in `weight`. A weight below 0 has no codes.
  __device__ ScaledLinesProduct(const Quantized& quantized, int n, int weight, int column, int k)
      : quantized_(quantized) {
    const int lane = threadIdx.x % 32, quad = lane % 4, slot = lane / 4;
    line_ = threadIdx.x % 128 / 32 * 16 + slot;
    has_x_ = slot / 2 == quad;
    // Lines of 128 bytes, whose pieces of 16 are swizzled by the row.
    x_first_ = quad / 2 * kSliceBytes + slot % 2 * 128 + ((quad % 2 * 4) ^ (slot % 2)) * 16;
    k += 32 * quad;
    left_ = weight >= 0 ? quantized.elements - k : 0;
    // A column that is not there has the scales of one that is.
    const int first = min(column + line_, n - 1), second = min(column + line_ + 8, n - 1);
    const int64_t line = static_cast<int64_t>(weight) * n + first;
    from_ = line * quantized.scale_line + (k >> quantized.scale_shift) * kScaleSize;
    second_ = (second - first) * quantized.scale_line;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums_[i][j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) LoadScales(i);
  }

  // Adds the products of 128 k, number `at` of a stage: two slices of x, its sums of 32 k (a row
  // has four), and codes of 64 columns. The result is some of the bits of each load.
  __device__ uint32_t Multiply(const char* x, const float* x_sums, const char* codes, int at) {
    float scales[2], biases[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = ToFloat(next_[at][r][0]);
      biases[r] = ToFloat(next_[at][r][1]);
    }
    LoadScales(at);
    const int quad = threadIdx.x % 4;
    uint32_t words[2][Tile::kWords], read = 0;
    float products[kPairs][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (Tile::kBySlices) {
          LoadWords<Tile::kWords>(Tile::Half(codes, line_, 8 * r, quad, half), words[r]);
        } else if (half == 0) {
          Tile::Load(codes, line_ + 8 * r, quad, words[r]);
        }
        read |= words[r][0] | words[r][Tile::kWords - 1];
      }
      uint32_t numbers[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {  // a step's four are of columns 0 and 1, 0 and 1
        const int pair = i / 2 + (Tile::kBySlices ? 0 : 8 * half);
        numbers[i] = NumbersOf<kBits>(words[i % 2], pair);
      }
      // Products of two pairs of rows take turns, since each waits for the one before.
#pragma unroll
      for (int first = 0; first < kPairs; first += 2) {
        uint32_t rows[2][8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          LoadRows(x, first + i / 2, 2 * half + i % 2, rows[i / 2] + i % 2 * 4);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int step = i / 2, of = i % 2;
          MultiplyWarp(numbers + 4 * step, rows[of][2 * step], rows[of][2 * step + 1],
                       products[first + of]);
        }
        read |= rows[0][0] | rows[0][4] | rows[1][0] | rows[1][4];
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float of_rows[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        of_rows[j] = x_sums[4 * (2 * i + j) + quad];
        read |= AsBits(of_rows[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums_[i][j] = MultiplyAdd(scales[j / 2], products[i][j], sums_[i][j]);
        sums_[i][j] = MultiplyAdd(biases[j / 2], of_rows[j % 2], sums_[i][j]);
      }
    }
    return read;
  }

  // The sums of all k, as MultiplyWarp has them: of every 8 rows those of 2 * (lane % 4) and the
  // next one, of both columns.
  __device__ void Finish(float* out) const {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      // Of four pairs thread j ends up with pair j. First it has pairs j % 2 and 2 more, or less.
      float kept[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float low = sums_[4 * eight + i][j];
          const float high = kPairs == 2 ? low : sums_[(4 * eight + i + 2) % kPairs][j];
          const bool upper = quad / 2 == 1;
          kept[i][j] = Add(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, 2));
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool upper = quad % 2 == 1;
        const float mine = upper ? kept[1][j] : kept[0][j];
        out[4 * eight + j] = Add(mine, __shfl_xor_sync(~0u, upper ? kept[0][j] : kept[1][j], 1));
      }
    }
  }

 private:
  __device__ float ToFloat(uint32_t bits) const {
    if constexpr (kFloat32) return AsFloat(bits);
    return quantized_.packed.half_scales ? HalfToFloat(bits) : AsFloat(bits << 16);
  }

  // Those of the next 128 k to next_[at]. Past the end x has zeros.
  __device__ void LoadScales(int at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& to = next_[at][i % 2][i / 2];
      to = 0;
      if (left_ <= 0) continue;
      const void* all = i < 2 ? quantized_.scales : quantized_.biases;
      const char* from = static_cast<const char*>(all) + (from_ + (i % 2 == 0 ? 0 : second_));
      if constexpr (kFloat32) {
        to = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        to = __ldg(reinterpret_cast<const uint16_t*>(from));
      }
    }
    from_ += (128 >> quantized_.scale_shift) * kScaleSize;
    left_ -= 128;
  }

  // Four of the lane's pairs, of its row of a pair of rows; zeros where it has none.
  __device__ void LoadRows(const char* x, int pair, int piece, uint32_t* to) const {
    LoadOrZeros(has_x_, x + pair * 256 + (x_first_ ^ ((pair % 4 * 2) ^ piece) * 16), to);
  }

  const Quantized& quantized_;
  int line_;                     // of the 64 columns
  bool has_x_;                   // this lane has x of its slot
  int x_first_;                  // where that begins
  int left_;                     // k from this thread's next on
  int second_;                   // bytes to the second column's scales
  int64_t from_;                 // bytes to the next scales of the first
  uint32_t next_[kAhead][2][2];  // bits of scale and bias of both columns
  float sums_[kPairs][4];
};

}  // namespace jgg::device

// Sums over k of few rows and an affine weight as it is stored, in float32: codes are multiplied as
// whole numbers, which bfloat16 holds, and scales multiply sums of the 32 k that share one.
//
// Thread j of a quad has 32 codes of every 128 k, from 32 * j on. One mma.sync adds up k of four
// threads, of which two share a scale, or none. So a row of x is two columns of the instruction, or
// four, one for the k of each scale, with zeros elsewhere. Columns 2 * j and 2 * j + 1, whose sums
// thread j has, are two rows of k whose scale it has. Plain C++ on the host, too
// (tests/lib/scaled_lines.cc).
#pragma once

#include <cstdint>

#include "quantized/device/line_tile.cuh"
#include "quantized/device/packed_format_sm90.cuh"
#include "quantized/device/value_planes.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

// Rows of x of a tile. x has its columns in an order in which a thread's pairs of 128 k lie
// together (quantized/gemm_sm90.h).
constexpr int kScaledLinesRows = 8;

// Rows of float32 of a tile, which become four rows each, of which its three planes are the first.
constexpr int kFloatLinesRows = 2, kRowsOfFloat = 4;

// How float32 rows become rows of planes, in that order: each piece of 16 bytes has eight k of 128.
template <int kBits>
struct OrderedPlanes {
  static constexpr int kApart = 16 % kBits ? 16 : 16 / kBits;  // the k of a pair
  static constexpr bool kNeighbours = kApart < 4;              // all eight k are neighbours
  // Four k of piece `piece` of 16 begin here, and the next four so many behind them.
  static constexpr int kSecondFour = kNeighbours ? 4 : kApart;
  JGG_HOST_DEVICE static int First(int piece) {
    const int thread = piece / 4, pair = piece % 4 * 4;
    return 32 * thread + pair / kApart * 2 * kApart + pair % kApart;
  }

  JGG_HOST_DEVICE static void Make(const float (&eight)[8], uint32_t (&planes)[kValuePlanes][4]) {
    static_assert(!kNeighbours || kApart == 2);
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int low = kNeighbours ? i / 2 * 4 + i % 2 : i, high = low + (kNeighbours ? 2 : 4);
      uint32_t of_pair[kValuePlanes];
      PlanesOfPair(eight[low], eight[high], of_pair);
      JGG_UNROLL
      for (int plane = 0; plane < kValuePlanes; ++plane) planes[plane][i] = of_pair[plane];
    }
  }

  // Where a piece of row `row` of a tile goes, in two slices of x.
  JGG_HOST_DEVICE static int PlaceOf(int piece, int row) {
    return (piece / 8 * kScaledLinesRows + row) * 128 + ((piece % 8) ^ row) * 16;
  }
};

// A tile's sums, as ScaledLinesProduct::Finish gives them, become those of two rows of float32: the
// first lane of a quad has both.
__device__ inline void AddPlanesOfRows(float* sums) {
  const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float sum = Add(sums[i], odd ? 0.0f : sums[i + 1]);
    sums[i] = Add(sum, __shfl_xor_sync(~0u, sum, 1));
    sums[i + 1] = __shfl_xor_sync(~0u, sums[i], 2);
  }
}

// A warp's product of kCount instructions' rows and 16 columns. kShare threads of a quad share a
// scale. kAhead: for how many 128 k scales are loaded before they are needed. Quantized is
// QuantizedGemmSm90, or what has its members on the host.
template <typename Quantized, int kBits, int kShare, int kCount, PackedFloats kFloats, int kAhead>
class ScaledLinesProduct {
  using Tile = LineTile<kBits>;
  static constexpr bool kFloat32 = kFloats == PackedFloats::k32Bits;
  static constexpr int kScaleSize = kFloat32 ? 4 : 2;
  static constexpr int kRowsEach = 2 * kShare;  // of an instruction
  // Sums that take turns, since each product waits for the one before.
  static constexpr int kTurns = kCount == 1 ? 2 : 1, kChains = kCount * kTurns;
  static_assert(kShare == 1 || kShare == 2);
  static_assert(kCount % 2 == 0 || kCount == 1);

 public:
  static constexpr int kRows = kRowsEach * kCount;
  static constexpr int kSliceBytes = kScaledLinesRows * 128;  // of x, of 64 k
  static_assert(kRows <= kScaledLinesRows);

  // The warp's columns begin with `column`, of n in `weight`. A weight below 0 has no codes.
  __device__ ScaledLinesProduct(const Quantized& quantized, int n, int weight, int column, int k)
      : quantized_(quantized) {
    // A kernel has many of these, of which it should not keep what all tiles have in common.
    const int thread = Forgotten(threadIdx.x);
    const int lane = thread % 32, quad = lane % 4, slot = lane / 4, row = slot % kRowsEach;
    line_ = thread % 128 / 32 * 16 + slot;
    has_x_ = slot / kRowsEach == quad / kShare;
    // Lines of 128 bytes, whose pieces of 16 are swizzled by the row.
    x_first_ = quad / 2 * kSliceBytes + row * 128 + ((quad % 2 * 4) ^ row) * 16;
    k += 32 * quad;
    left_ = weight >= 0 ? quantized.elements - k : 0;
    // A column that is not there has the scales of one that is.
    const int first = min(column + line_, n - 1), second = min(column + line_ + 8, n - 1);
    const int64_t line = static_cast<int64_t>(weight) * n + first;
    from_ = line * quantized.scale_line + (k >> quantized.scale_shift) * kScaleSize;
    second_ = (second - first) * quantized.scale_line;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
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
    float products[kChains][4] = {};
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
      constexpr int kAtOnce = kCount < 2 ? 1 : 2;  // rows of two instructions
#pragma unroll
      for (int first = 0; first < kCount; first += kAtOnce) {
        uint32_t rows[kAtOnce][8];
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          LoadRows(x, first + i / 2, 2 * half + i % 2, rows[i / 2] + i % 2 * 4);
          read |= rows[i / 2][i % 2 * 4];
        }
#pragma unroll
        for (int i = 0; i < 4 * kAtOnce; ++i) {
          const int step = i / kAtOnce, of = i % kAtOnce;
          MultiplyWarp(numbers + 4 * step, rows[of][2 * step], rows[of][2 * step + 1],
                       products[(first + of) * kTurns + step % kTurns]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float of_rows[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = kRowsEach * i + quad % kShare * 2 + j;
        const float* four = x_sums + 4 * row + quad / kShare * kShare;
        of_rows[j] = kShare == 1 ? four[0] : Add(four[0], four[1]);
        read |= AsBits(of_rows[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float product = products[kTurns * i][j];
        if (kTurns == 2) product = Add(product, products[1][j]);
        sums_[i][j] = MultiplyAdd(scales[j / 2], product, sums_[i][j]);
        sums_[i][j] = MultiplyAdd(biases[j / 2], of_rows[j % 2], sums_[i][j]);
      }
    }
    return read;
  }

  // The sums of all k, as MultiplyWarp has them: of eight rows those of 2 * (lane % 4) and the next
  // one, of both columns. Rows that are not there have any.
  __device__ void Finish(float* out) const {
    const int quad = threadIdx.x % 4;
    const bool upper = quad / 2 == 1, odd = quad % 2 == 1;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The instructions of upper threads are the last half: with kShare == 1 each thread's rows
      // are one of two that are left then.
      const auto both = [&](int low, int high) {
        const float first = sums_[low % kCount][j], last = sums_[high % kCount][j];
        return Add(upper ? last : first, __shfl_xor_sync(~0u, upper ? first : last, 2));
      };
      if constexpr (kShare == 2) {
        out[j] = both(0, 1);
      } else {
        const float even_rows = both(0, 2), odd_rows = both(1, 3);
        out[j] =
            Add(odd ? odd_rows : even_rows, __shfl_xor_sync(~0u, odd ? even_rows : odd_rows, 1));
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

  // Four of the lane's pairs, of its row of an instruction's; zeros where it has none.
  __device__ void LoadRows(const char* x, int number, int piece, uint32_t* to) const {
    const int swizzle = kRowsEach * number ^ piece;  // of rows and pieces from 0 on
    LoadOrZeros(has_x_, x + kRowsEach * number * 128 + (x_first_ ^ swizzle * 16), to);
  }

  const Quantized& quantized_;
  int line_;                     // of the 64 columns
  bool has_x_;                   // this lane has x of its slot
  int x_first_;                  // where that begins
  int left_;                     // k from this thread's next on
  int second_;                   // bytes to the second column's scales
  int64_t from_;                 // bytes to the next scales of the first
  uint32_t next_[kAhead][2][2];  // bits of scale and bias of both columns
  float sums_[kCount][4];
};

}  // namespace jgg::device

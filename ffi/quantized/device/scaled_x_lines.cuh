// Sums over n of few float32 rows of x and lines (n) of codes as they are stored, quantized along
// their own axis, k: see scaled_x_sm90.cuh. Scales and biases come in float32.
//
// Here a lane's codes are 16 neighbours, or two times 8, of two lines. A warpgroup has 64 k, which
// are one group, or two. Up to two rows are columns of one instruction, four for each: its three
// planes, and one that nobody reads. More rows take an instruction for each plane. Plain C++ on the
// host, too (tests/lib/scaled_x_lines.cc).
#pragma once

#include <cstdint>

#include "quantized/device/formats.cuh"
#include "quantized/device/line_tile.cuh"
#include "quantized/device/value_planes.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

// Where a lane's codes of a warpgroup's 64 k are.
template <typename Codes>
struct HalfLines {
  static constexpr int kApart = Codes::kApart, kSecondColumn = kApart == 1 ? 2 : 1;

  // Column `column` of a warpgroup's sums, the first of a lane's two. The other one is
  // kSecondColumn behind it.
  JGG_HOST_DEVICE static int ColumnOf(int group, int column) {
    const int lane = column % 16 / 2, p = lane / 2 * 8 + column / 16 * 2;
    return 64 * group + lane % 2 * 32 + p / kApart * 2 * kApart + column % 2 * kApart + p % kApart;
  }
};

// A warp's product of up to 8 rows and 16 of every 64 n, which the warps of a warpgroup share out.
// The warpgroup's k are kGroups groups. kFew: there are at most two rows.
template <Mode kMode, int kBits, int kGroups, bool kFew>
class ScaledXLinesProduct {
  using Codes = LineCodes<kMode, kBits>;
  using Tile = LineTile<kBits>;
  static constexpr int kHalfWords = (kBits + 1) / 2;             // of 16 codes
  static constexpr int kScaleBytes = Codes::kHasBiases ? 8 : 4;  // of a line and group
  static constexpr int kProducts = kFew ? 1 : kValuePlanes;      // of 16 columns and n
  static constexpr uint32_t kUpper = 0xffff0000;

 public:
  using Sums = float[4][4];  // of 16 columns each, as MultiplyWarp has them
  static constexpr int kRows = 8, kFewRows = 2, kBoxBytes = kRows * 128;  // a box has 32 n

  __device__ ScaledXLinesProduct() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, slot = lane / 4;
    line_ = warp * 16 + slot;
    const int row = kFew ? slot / 4 : slot, plane = slot % 4;
    // Lines of 128 bytes, whose pieces of 16 are swizzled by the row.
    const int piece = (warp % 2 * 4 + lane % 4 / 2) ^ row;
    x_first_ = warp / 2 * kBoxBytes + row * 128 + piece * 16 + lane % 2 * 8;
    first_mask_ = plane > 0 ? kUpper : 0;
    second_mask_ = plane > 1 ? kUpper : 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sums_[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) bias_sums_[i] = 0.0f;
  }

  // Adds a slice's products: two boxes of x, codes of 128 k, of which half `group` is multiplied,
  // and for each group of that half scales of 64 lines, with biases beside them. The result is some
  // of the bits of each load.
  __device__ uint32_t Multiply(const char* x, const char* codes, const char* scales, int group) {
    uint32_t words[2][kHalfWords], read = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      LoadHalf(codes, 8 * r, group, words[r]);
      read |= words[r][0] | words[r][kHalfWords - 1];
    }
    uint32_t planes[kGroups][kProducts][2];  // of x times scales
#pragma unroll
    for (int g = 0; g < kGroups; ++g) read |= ScaleRows(x, scales, g, planes[g]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t numbers[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // pair of codes, and line
        numbers[j] = Codes::NumberPair(words[j % 2], 2 * i + j / 2);
      }
      const uint32_t turned[4] = {Turned(numbers[0]), Turned(numbers[2]), Turned(numbers[1]),
                                  Turned(numbers[3])};
      // Tensor cores cut sums off, so they add up 16 n only.
      float products[kGroups][4] = {};
#pragma unroll
      for (int plane = kProducts - 1; plane >= 0; --plane) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          MultiplyWarp(turned, planes[g][plane][0], planes[g][plane][1], products[g]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums_[i][j] += OfGroup() == 0 ? products[0][j] : products[kGroups - 1][j];
      }
    }
    return read;
  }

  // The sums of the warp's n, behind the last slice.
  __device__ const Sums& Finish() {
    if constexpr (Codes::kHasBiases) AddBiases();
    return sums_;
  }

  // Makes all warps' sums of 16 columns those of rows: a lane has two neighbours.
  template <int kSums>
  __device__ static void AddPlanes(float (&sums)[kSums]) {
    if constexpr (kFew) {
      const bool first = threadIdx.x % 2 == 0;  // of a row's two lanes
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = Add(sums[2 * i], first ? sums[2 * i + 1] : 0.0f);
        sum = Add(sum, __shfl_xor_sync(~0u, sum, 1));
        sums[2 * i] = sum;
        sums[2 * i + 1] = __shfl_xor_sync(~0u, sum, 2);
      }
    }
  }

 private:
  // Of which group the sums of this lane's columns are.
  __device__ static int OfGroup() { return kGroups == 1 ? 0 : threadIdx.x / 8 % 2; }

  // Pairs of 16 codes of a line, so that they are where pairs from 0 on are: shifts are constants.
  __device__ void LoadHalf(const char* codes, int further, int group,
                           uint32_t (&to)[kHalfWords]) const {
    const int quad = threadIdx.x % 4, piece = 2 * group + quad % 2, half = quad / 2;
    if constexpr (Tile::kBySlices) {
      LoadWords<kBits / 2>(Tile::Half(codes, line_, further, piece, half), to);
    } else {
      uint32_t words[kBits];
      Tile::Load(codes, line_ + further, piece, words);
#pragma unroll
      for (int i = 0; i < kHalfWords; ++i) {
        uint32_t second = words[kBits / 2 + i];
        if constexpr (kBits % 2 == 1) {
          second = Permute(second, words[min(kBits / 2 + i + 1, kBits - 1)], 0x6341);
        }
        to[i] = half == 0 ? words[i] : second;
      }
    }
  }

  // A lane has n, n + 1, n + 8 and n + 9 of 16 n, n = lane % 4 * 2, of its row.
  __device__ uint32_t ScaleRows(const char* x, const char* scales, int g,
                                uint32_t (&planes)[kProducts][2]) {
    const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 4 * 2;
    uint32_t read = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t two[2], of[kScaleBytes / 2];
      LoadWords<2>(x + (x_first_ ^ r * 32), two);
      LoadWords<kScaleBytes / 2>(scales + (64 * g + first + 8 * r) * kScaleBytes, of);
      read |= two[0] | of[0];
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[i] = device::Multiply(AsFloat(two[i]), AsFloat(of[i * (kScaleBytes / 4)]));
        if constexpr (Codes::kHasBiases) {
          bias_sums_[g] = MultiplyAdd(AsFloat(two[i]), AsFloat(of[2 * i + 1]), bias_sums_[g]);
        }
      }
      if constexpr (kFew) {
#pragma unroll
        for (float& value : values) {
          value = Add(value, -AsFloat(AsBits(value) & first_mask_));
          value = Add(value, -AsFloat(AsBits(value) & second_mask_));
        }
        planes[0][r] = Permute(AsBits(values[0]), AsBits(values[1]), 0x7632);
      } else {
        uint32_t of_pair[kValuePlanes];
        PlanesOfPair(values[0], values[1], of_pair);
#pragma unroll
        for (int plane = 0; plane < kProducts; ++plane) planes[plane][r] = of_pair[plane];
      }
    }
    return read;
  }

  // A lane has some n of one row, and sums of two slots.
  __device__ void AddBiases() {
    const int quad = threadIdx.x % 4;
    float two[2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float sum = bias_sums_[g];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_slot = __shfl_sync(~0u, sum, quad * 8 + i * 4);
        if (g == 0 || OfGroup() == g) two[i] = of_slot;
      }
    }
    if constexpr (kFew) {  // to the first plane alone
      if (quad % 2 == 1) two[0] = 0.0f;
      two[1] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sums_[i / 4][i % 4] += two[i % 2];
  }

  int line_;                           // the first of this lane's two
  int x_first_;                        // where its x begins
  uint32_t first_mask_, second_mask_;  // kFew: of its plane
  Sums sums_;
  float bias_sums_[kGroups];
};

}  // namespace jgg::device

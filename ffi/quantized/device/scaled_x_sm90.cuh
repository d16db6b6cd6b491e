// Sums over n of few float32 rows of x and a weight in layout "sm90" that is quantized along N, by
// warps. Scales multiply x: of 16 n a warp has 64 columns that share scales, or a half or a quarter
// of them. Three bfloat16 planes of each product meet codes as whole numbers. Biases multiply x by
// FMA, since what they add to a row is the same for all columns that share them. So nothing is
// rounded but to float32. Plain C++ on the host, too (tests/lib/scaled_x.cc).
#pragma once

#include <cstdint>

#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/device/value_planes.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

// A warp's product of 8 rows and 16 of every 64 n, which the warps of a warpgroup share out. A
// tile's columns are kGroups groups, which share scales.
template <typename Tiles, int kGroups>
class ScaledXProduct {
  using Codes = typename Tiles::Codes;
  static constexpr int kWords = Tiles::kTileCodes / 512;

 public:
  using Sums = float[4][4];  // of 16 columns each, as MultiplyWarp has them
  static constexpr int kRows = 8, kBoxBytes = kRows * 128;  // a box has 32 n

  __device__ explicit ScaledXProduct(const PackedCodesSm90& packed) : packed_(packed) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = lane / 4;
    // Lines of 128 bytes, whose pieces of 16 are swizzled by the row.
    const int piece = (warp % 2 * 4 + lane % 4 / 2) ^ row;
    x_first_ = warp / 2 * kBoxBytes + row * 128 + piece * 16 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i) sums_[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) bias_sums_[i] = 0.0f;
  }

  // Adds a slice's products: two boxes of x, codes and scales of two tiles, of which `tile` is one.
  // The result is some of the bits of each load.
  __device__ uint32_t Multiply(const char* x, const char* codes, const char* scales, int tile) {
    uint32_t words[kWords], read = 0;
    codes += tile * Tiles::kTileCodes;
    const int thread = static_cast<int>(threadIdx.x % 128);
    if constexpr (kWords < 8) {
      LoadCodes(codes, thread, words);
      read = words[0] | words[kWords - 1];
    }
    uint32_t planes[kValuePlanes][2];  // of x times scales
    if (!packed_.tiles_share) scales += tile * Tiles::TileScales(packed_);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWords == 8) {  // a half of them occupies registers
        if (i % 2 == 0) {
          LoadWords<4>(codes + 1024 * i + 16 * thread, words + 2 * i);
          read |= words[2 * i];
        }
      }
      if (Begins(i)) read |= ScaleRows(x, scales, i * kGroups / 4, planes);
      uint32_t numbers[4];
      Codes::Numbers(words, i, numbers);
      const uint32_t turned[4] = {Turned(numbers[0]), Turned(numbers[2]), Turned(numbers[1]),
                                  Turned(numbers[3])};
      // Tensor cores cut sums off, so they add up 16 n only.
      float products[4] = {};
#pragma unroll
      for (int plane = kValuePlanes - 1; plane >= 0; --plane) {
        MultiplyWarp(turned, planes[plane][0], planes[plane][1], products);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums_[i][j] += products[j];
    }
    return read;
  }

  // The sums of the warp's n, behind the last slice.
  __device__ const Sums& Finish() {
    if constexpr (Codes::kHasBiases) AddBiases();
    return sums_;
  }

 private:
  // Whether a group begins with 16 columns.
  __device__ static constexpr bool Begins(int columns) { return columns * kGroups % 4 == 0; }

  // A lane has n, n + 1, n + 8 and n + 9 of 16 n, n = lane % 4 * 2, of row lane / 4.
  __device__ uint32_t ScaleRows(const char* x, const char* scales, int group,
                                uint32_t (&planes)[kValuePlanes][2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    float scale[2][2], bias[2][2];  // [n % 2][n / 8]
    uint32_t read = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = group * 32 + warp * 8 + lane % 4 * 2 + i;
      read |= Codes::FloatScales(scales, pair, packed_, scale[i], bias[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t two[2];
      LoadWords<2>(x + (x_first_ ^ r * 32), two);
      read |= two[0];
      const float first = AsFloat(two[0]), second = AsFloat(two[1]);
      if constexpr (Codes::kHasBiases) {
        float& sum = bias_sums_[group];
        sum = MultiplyAdd(second, bias[1][r], MultiplyAdd(first, bias[0][r], sum));
      }
      uint32_t of_pair[kValuePlanes];
      PlanesOfPair(device::Multiply(first, scale[0][r]), device::Multiply(second, scale[1][r]),
                   of_pair);
#pragma unroll
      for (int plane = 0; plane < kValuePlanes; ++plane) planes[plane][r] = of_pair[plane];
    }
    return read;
  }

  // A lane has some n of one row, and sums of two rows.
  __device__ void AddBiases() {
    const int first = threadIdx.x % 4 * 8;  // a lane of the first of them
    float two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Begins(i)) {
        float sum = bias_sums_[i * kGroups / 4];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        two[0] = __shfl_sync(~0u, sum, first);
        two[1] = __shfl_sync(~0u, sum, first + 4);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums_[i][j] += two[j % 2];
    }
  }

  const PackedCodesSm90& packed_;
  int x_first_;  // where a lane's x begins
  Sums sums_;
  float bias_sums_[kGroups];  // of row lane / 4
};

}  // namespace jgg::device

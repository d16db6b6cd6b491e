// How kernels decode mode "fp8" in registers; quantized/formats/fp8.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/line_format.cuh"
#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// A scale is the sum of two bfloat16 numbers, the upper half of a word the smaller one, for every
// 128 k. They are 2^88 times what they stand for, so that a code is brought back by the product
// that scales it, and values are 2^-32 of what they stand for. Code 127 as for mxfp8.
template <>
struct PackedCodes<Mode::kFp8, 8> : PackedCodesBase<Mode::kFp8, 8> {
  static constexpr float kFactor = 0x1p32f;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[8], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = scales[0][i % 2], rest = Multiply2(pairs[i], Twice(both, 1));
      a[i] = MultiplyAdd2<DType::kBF16>(pairs[i], Twice(both, 0), rest);
    }
  }

  // The values of codes, and scales, for scaled_weights_sm90.cuh.
  __device__ static void Numbers(const uint32_t (&codes)[8], int step, uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Multiply2(pairs[i], k2To120);
  }

  static constexpr int kMostFloatScales = PackedCodesBase<Mode::kFp8, 8>::kStageScales;

  template <PackedFloats = PackedFloats::kAny>
  __device__ static uint32_t FloatScales(const char* tile, int pair, const PackedCodesSm90&,
                                         float (&scales)[2], float (&)[2]) {
    uint32_t words[2];
    LoadWords<2>(tile + 8 * pair, words);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = (AsFloat(words[r] << 16) + AsFloat(words[r] & 0xffff0000)) * 0x1p-88f;
    }
    return words[0];
  }

  // Scales are 2^120 times what they stand for, and values what they are. Scales from 2^8 on are
  // infinite.
  template <bool kFewRows, ScaleRange>
  __device__ static void DecodeHalf(const uint32_t (&codes)[8], int step,
                                    const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
    float both[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = scales[0][i];
      both[i] = (AsFloat(word << 16) + AsFloat(word & 0xffff0000)) * 0x1p32f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Round2<DType::kF16>(AsFloat(pairs[i] << 16) * both[i % 2],
                                 AsFloat(pairs[i] & 0xffff0000) * both[i % 2]);
    }
  }
};

// Codes as they are stored: one instruction makes float16 of two neighbours, NaN too. Scales are
// float32. They multiply sums of 128 k (ScaleRange::kSums), and codes come as the numbers that they
// are, in pairs of words' halves, as x has its columns. In dx, whose sums are of lines, code times
// scale is rounded once, and neighbours are pairs.
template <>
struct LineCodes<Mode::kFp8, 8> : LineCodesBase<Mode::kFp8, 8> {
  static constexpr int kApart = 1;
  static constexpr bool kScalesSums = true;

  template <ScaleRange>
  __device__ static uint32_t Word(const Loaded& loaded) {
    return loaded[0];
  }

  template <ScaleRange kRange>
  __device__ static uint32_t PairOf(const uint32_t* codes, int p, uint32_t word) {
    const uint32_t pair = Numbers<kRange>(codes, p);
    if constexpr (kRange == ScaleRange::kSums) return BFloat16Of(pair);
    return Scaled<DType::kBF16>(pair, word);
  }

  // Neighbours as the numbers that they are, for scaled_x_lines.cuh.
  __device__ static uint32_t NumberPair(const uint32_t* codes, int p) {
    return BFloat16Of(Numbers<ScaleRange::kAny>(codes, p));
  }

  // Infinite from 2^16 on.
  template <ScaleRange kRange>
  __device__ static uint32_t HalfPairOf(const uint32_t* codes, int p, uint32_t word) {
    const uint32_t pair = Numbers<kRange>(codes, p);
    return kRange == ScaleRange::kSums ? pair : Scaled<DType::kF16>(pair, word);
  }

 private:
  template <ScaleRange kRange>
  __device__ static uint32_t Numbers(const uint32_t* codes, int p) {
    const uint32_t four = codes[p / 2];
    return HalvesOfE4M3(kRange == ScaleRange::kSums ? Permute(four, 0, 0x3120) : four, p % 2);
  }

  // bfloat16 holds them.
  __device__ static uint32_t BFloat16Of(uint32_t pair) {
    return Permute(AsBits(Half<DType::kF16>(pair, 0)), AsBits(Half<DType::kF16>(pair, 1)), 0x7632);
  }

  template <DType kTo>
  __device__ static uint32_t Scaled(uint32_t pair, uint32_t word) {
    return Round2<kTo>(Multiply(Half<DType::kF16>(pair, 0), AsFloat(word)),
                       Multiply(Half<DType::kF16>(pair, 1), AsFloat(word)));
  }
};

}  // namespace jgg::device

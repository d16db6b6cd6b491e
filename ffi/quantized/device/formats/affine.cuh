// How kernels decode mode "affine" in registers; quantized/formats/affine.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/line_format.cuh"
#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// A word of scales is scale and bias, bfloat16, of 64 or 128 k, or of 32 where there are two: then
// they are not small.
template <int kBits>
struct PackedCodes<Mode::kAffine, kBits> : PackedCodesBase<Mode::kAffine, kBits> {
  static constexpr bool kHasSmall = kBits < 8;
  static constexpr float kSmallFactor = 0x1p8f;

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadScales(const char* scales, int tile_scales, uint32_t (&words)[2][2]) {
    LoadWords<2>(scales, words[0]);
    if constexpr (kRange == ScaleRange::kSmall) {
      words[1][0] = words[0][0];
    } else {  // the first again where there is no second
      LoadWords<2>(scales + max(tile_scales - PackedCodes::kTileScales, 0), words[1]);
    }
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void Decode(const uint32_t (&codes)[kBits], int step,
                                const uint32_t (&scales)[2][2], uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = 4 * step + i;
      if constexpr (kRange == ScaleRange::kSmall) {
        const CodePair alone = PackedPairOf<kBits, kEndAlone>(codes, pair, 0);
        const uint32_t both = SmallScales(scales[0][i % 2], alone.place);
        a[i] = MultiplyAdd2<DType::kBF16>(alone.bits, Twice(both, 0), Twice(both, 1));
      } else {
        const uint32_t both = scales[step / 2][i % 2];
        a[i] =
            MultiplyAdd2<DType::kBF16>(PackedCodePair(codes, pair), Twice(both, 0), Twice(both, 1));
      }
    }
  }

  // Codes as whole numbers, and scales and biases, for scaled_weights_sm90.cuh.
  __device__ static void Numbers(const uint32_t (&codes)[kBits], int step, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = PackedCodePair(codes, 4 * step + i);
  }

  // Bytes of float32 scales and biases: 64 columns x 128 k in groups of 16.
  static constexpr int kMostFloatScales = 8 * 64 * 8;

  template <PackedFloats kFloats = PackedFloats::kAny>
  __device__ static uint32_t FloatScales(const char* tile, int pair, const PackedCodesSm90& packed,
                                         float (&scales)[2], float (&biases)[2]) {
    if (kFloats == PackedFloats::kAny ? packed.float_scales : kFloats == PackedFloats::k32Bits) {
      uint32_t words[4];
      LoadWords<4>(tile + 16 * pair, words);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scales[r] = AsFloat(words[2 * r]);
        biases[r] = AsFloat(words[2 * r + 1]);
      }
      return words[0];
    }
    uint32_t words[2];
    LoadWords<2>(tile + 8 * pair, words);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t scale = words[r] & 0xffff, bias = words[r] >> 16;
      scales[r] = packed.half_scales ? HalfToFloat(scale) : AsFloat(scale << 16);
      biases[r] = packed.half_scales ? HalfToFloat(bias) : AsFloat(bias << 16);
    }
    return words[0];
  }

  // Scale and bias are float16, too. Codes of 2 bits, where scales are small, are alone in bits 9
  // and 10, or 7 and 8, of a half: 2^-15 or 2^-17 times themselves.
  static constexpr bool kHasSmallHalves = kBits == 2;

  __device__ static uint32_t NotSmallHalfBits(const char* scales) {
    uint32_t words[2];
    LoadWords<2>(scales, words);
    return NotSmallHalf(words[0]) | NotSmallHalf(words[1]);
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadHalfScales(const char* scales, int tile_scales,
                                        uint32_t (&words)[2][2]) {
    LoadScales<kFewRows, kRange>(scales, tile_scales, words);
    if constexpr (kRange == ScaleRange::kSmall) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        words[0][r] = SmallHalfScales(words[0][r], 9);
        words[1][r] = SmallHalfScales(words[0][r], 7);
      }
    }
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void DecodeHalf(const uint32_t (&codes)[kBits], int step,
                                    const uint32_t (&scales)[2][2], uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = 4 * step + i;
      if constexpr (kRange == ScaleRange::kSmall) {
        const CodePair alone = PackedHalfAlone(codes, number);
        const uint32_t both = scales[alone.place == 9 ? 0 : 1][i % 2];
        a[i] = MultiplyAdd2<DType::kF16>(alone.bits, Twice(both, 0), Twice(both, 1));
      } else {
        const uint32_t both = scales[step / 2][i % 2];
        a[i] = MultiplyAdd2<DType::kF16>(PackedHalfPair(codes, number), Twice(both, 0),
                                         Twice(both, 1));
      }
    }
  }
};

// Whole numbers times bfloat16, plus bfloat16.
template <int kBits>
struct LineCodes<Mode::kAffine, kBits> : LineCodesBase<Mode::kAffine, kBits> {
  using typename LineCodesBase<Mode::kAffine, kBits>::Loaded;
  static constexpr bool kHasSmall = kBits <= 4;
  static constexpr float kSmallFactor = 0x1p8f;

  __device__ static LineScales Scales(uint32_t scale, uint32_t bias, int b, bool one_group) {
    const uint32_t both = b == 0 || one_group ? 0x1010 : 0x3232;
    return {Permute(scale, 0, both), Permute(bias, 0, both)};
  }

  // NumbersOf are whole numbers of 8 bits at most, which bfloat16 holds, so 8 bits may, too.
  __device__ static bool Fits(const LineScales& line) {
    constexpr int kMostBelow = 14 - kBits, kMostAbove = 14;
    const float scale = AsFloat(line.scale << 16), bias = AsFloat(line.bias << 16);
    const uint32_t above = AsBits(fabsf(bias)) - AsBits(fabsf(scale)) + (kMostBelow << 23);
    return fabsf(scale) < 0x1p105f &&
           (above <= static_cast<uint32_t>(kMostBelow + kMostAbove) << 23 || bias == 0.0f);
  }

  template <bool>
  __device__ static uint32_t Pair(const uint32_t (&streams)[kBits], int p, const LineScales& line) {
    return MultiplyAdd2<DType::kBF16>(NumbersOf<kBits>(streams, p), line.scale, line.bias);
  }

  __device__ static uint32_t FloatPair(const uint32_t (&streams)[kBits], int p,
                                       const FloatScales& of) {
    const uint32_t numbers = NumbersOf<kBits>(streams, p);
    float values[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = Add(Multiply(Half<DType::kBF16>(numbers, i), of.scale[i]), of.bias[i]);
    }
    return Round2<DType::kBF16>(values[0], values[1]);
  }

  // Codes as the numbers that they are, for scaled_x_lines.cuh.
  __device__ static uint32_t NumberPair(const uint32_t* codes, int p) {
    return NumbersOf<kBits>(codes, p);
  }

  // Puts scale and bias together, which take fewer registers so.
  __device__ static uint32_t NotSmall(Loaded& loaded) {
    loaded[0] |= loaded[1] << 16;
    loaded[1] = 0;
    return device::NotSmall(loaded[0]);
  }

  template <ScaleRange>
  __device__ static uint32_t Word(const Loaded& loaded) {
    return loaded[0] | loaded[1] << 16;
  }

  template <ScaleRange kRange>
  __device__ static uint32_t PairOf(const uint32_t* codes, int p, uint32_t word) {
    uint32_t numbers;
    if constexpr (kRange == ScaleRange::kSmall) {
      const CodePair alone = CodesOf<kBits, kEndAlone>(codes, p, 0);
      numbers = alone.bits;
      word = SmallScales(word, alone.place);
    } else {
      numbers = NumbersOf<kBits>(codes, p);
    }
    return MultiplyAdd2<DType::kBF16>(numbers, Twice(word, 0), Twice(word, 1));
  }

  // Scale and bias are float16, too.
  template <ScaleRange>
  __device__ static uint32_t HalfPairOf(const uint32_t* codes, int p, uint32_t word) {
    return MultiplyAdd2<DType::kF16>(HalfNumbersOf<kBits>(codes, p), Twice(word, 0),
                                     Twice(word, 1));
  }
};

}  // namespace jgg::device

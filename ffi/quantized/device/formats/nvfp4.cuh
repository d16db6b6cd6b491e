// How kernels decode mode "nvfp4" in registers; quantized/formats/nvfp4.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/line_format.cuh"
#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// Scales are e4m3 with one more bit of exponent, so that all are normal: (exponent + 10) * 8 +
// mantissa, and 255 for NaN; where one is 0, so are codes. Values are 2^-19 of what they stand for.
template <>
struct PackedCodes<Mode::kNvfp4, 4> : PackedCodesBase<Mode::kNvfp4, 4> {
  static constexpr float kFactor = 0x1p19f, kHalfFactor = 0x1p7f;
  static constexpr int kLoadsLateFrom = 3;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[4], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E2M1Pairs(codes[step], pairs);
    const uint32_t s = Scale<kFewRows>(scales[0][0], step);
    const uint32_t s8 = Scale<kFewRows>(scales[0][1], step);
    a[0] = Multiply2(pairs[0], s);
    a[1] = Multiply2(pairs[1], s8);
    a[2] = Multiply2(pairs[2], s);
    a[3] = Multiply2(pairs[3], s8);
  }

  // 2^-7 of what they stand for: from 2^-17 to 21, all of which float16 holds. The scales' bits are
  // those of float16, 2^-5 of what they stand for; codes are 2^-14.
  template <bool kFewRows, ScaleRange>
  __device__ static void DecodeHalf(const uint32_t (&codes)[4], int step,
                                    const uint32_t (&scales)[1][2], uint32_t* a) {
    constexpr uint32_t k2To12 = 0x6c006c00;
    E2M1HalfPairs(codes[step], a);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t two = Permute(scales[0][r], 0, step < 2 ? 0x4140 : 0x4342);
      const uint32_t scale =
          MultiplyAdd2<DType::kF16>(two * PowerOfTwo<kFewRows>(7), k2To12, kMinusZeros);
      for (int i = r; i < 4; i += 2) {
        a[i] = MultiplyAdd2<DType::kF16>(a[i], Twice(scale, step % 2), kMinusZeros);
      }
    }
  }

 private:
  // 2^107 times the scale, twice: made for two steps at a time.
  template <bool kFewRows>
  __device__ static uint32_t Scale(uint32_t bytes, int step) {
    const uint32_t two = Permute(bytes, 0, step < 2 ? 0x4140 : 0x4342);
    return Twice(two * PowerOfTwo<kFewRows>(4) + 0x70007000, step % 2);
  }
};

// An e4m3 scale times 2^126, as which it would be the only factor of E2M1Of, exceeds bfloat16;
// times 2^117 it fits.
template <>
struct LineCodes<Mode::kNvfp4, 4> : LineCodesBase<Mode::kNvfp4, 4> {
  static constexpr float kUnit = 0x1p9f, kSmallFactor = kUnit, kHalfUnit = 0x1p7f;

  __device__ static LineScales Scales(uint32_t scale, uint32_t, int b, bool) {
    const uint32_t magnitudes = Permute(scale, 0, b == 0 ? 0x4140 : 0x4342) & 0x007f007f;
    scale = MultiplyAdd2<DType::kBF16>(magnitudes << 4, kTwo120, ZerosOrNaN(magnitudes));
    return {Times(scale, kTwo126 - 9 * kTwice), 0};  // 9: kUnit
  }

  __device__ static bool Fits(const LineScales&) { return true; }

  template <bool kFits>
  __device__ static uint32_t Pair(const uint32_t (&streams)[4], int p, const LineScales& line) {
    return Times(E2M1Of(streams, p), line.scale);
  }

  template <ScaleRange>
  __device__ static uint32_t Word(const Loaded& loaded) {
    return Scales(loaded[0], 0, 0, true).scale;
  }

  // Bits of e4m3 are those of a float16 that is 2^-8 of it; 2^7 times it still is one, and with
  // E2M1HalvesOf makes 2^-7 of a value, which float16 holds.
  template <ScaleRange>
  __device__ static uint32_t HalfWord(const Loaded& loaded) {
    constexpr uint32_t k2To15 = 0x78007800;
    const uint32_t magnitudes = Permute(loaded[0], 0, 0x4140) & 0x007f007f;
    return MultiplyAdd2<DType::kF16>(magnitudes << 7, k2To15, ZerosOrNaN(magnitudes));
  }

  template <bool, int kCodes>
  __device__ static uint32_t OfHalf(uint32_t word, int half, const uint32_t (&)[kCodes]) {
    return Twice(word, half);
  }

  template <ScaleRange>
  __device__ static uint32_t PairOf(const uint32_t* codes, int p, uint32_t word) {
    return Multiply2(E2M1Of(codes, p), word);
  }

  template <ScaleRange>
  __device__ static uint32_t HalfPairOf(const uint32_t* codes, int p, uint32_t word) {
    return TimesHalves(E2M1HalvesOf(codes, p), word);
  }

 private:
  // A number to add to a scale: NaN where all bits of the scale are set, else -0.
  __device__ static uint32_t ZerosOrNaN(uint32_t magnitudes) {
    return ((magnitudes + 0x10001) >> 1 & 0x400040) * 511 + 0x80008000;
  }
};

}  // namespace jgg::device

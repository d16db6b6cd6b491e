// What a thread of a warpgroup has of a tile of 64 columns x 64 k, decoded to bfloat16 as WGMMA's
// A operand takes it: four words for every 16 k, of pairs of neighbours in k.
#pragma once

#include <cstdint>

#include "quantized/quantized.h"

namespace jgg::device {

// Products of pairs of bfloat16, rounded once; subnormals count.
__device__ inline uint32_t Multiply2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ inline uint32_t MultiplyAdd2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// The lower or upper half of a word, twice.
__device__ inline uint32_t Twice(uint32_t word, int half) {
  return __byte_perm(word, 0, half == 0 ? 0x1010 : 0x3232);
}

// 2^exponent. kHidden: the compiler does not know, so that products by it are not done by the pipe
// of shifts and masks, which is the busiest where there are few rows.
template <bool kHidden>
__device__ uint32_t PowerOfTwo(int exponent) {
  return (kHidden ? gridDim.z : 1u) << exponent;
}

// e2m1: the sign and the three other bits of a code where bfloat16 has its sign and the last bit of
// its exponent and the first two of its mantissa: 2^-126 times the value, subnormals included. In
// each half of a word the four codes' other bits are 8-6, 5-3, 2-0 and 11-9, their signs 15, 12, 14
// and 13.
template <bool kFewRows>
__device__ void ToPairs(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80008000, kOthers = 0x01c001c0;
  pairs[0] = codes & (kSigns | kOthers);
  pairs[1] = codes << 3 & (kSigns | kOthers);
  pairs[2] = (codes << 6 & kOthers) | (codes << 1 & kSigns);
  pairs[3] =
      (__umulhi(codes, PowerOfTwo<kFewRows>(29)) & kOthers) | (codes << 2 & kSigns);  // codes >> 3
}

// A mode's weights. kScaleWords: words that a row has in a tile for its scales.
template <Mode kMode, int kScaleWords_>
struct WeightsSm90;

// Scales are e4m3 with one more bit of exponent, so that all are normal: (exponent + 10) * 8 +
// mantissa, and 255 for NaN; where one is 0, so are codes. Values are 2^-19 of what they stand for.
template <>
struct WeightsSm90<Mode::kNvfp4, 1> {
  static constexpr int kScaleWords = 1;
  static constexpr float kFactor = 0x1p19f;

  template <bool kFewRows>
  __device__ static void Decode(uint32_t codes, int step, const uint32_t (&row)[1],
                                const uint32_t (&row8)[1], uint32_t* a) {
    uint32_t pairs[4];
    ToPairs<kFewRows>(codes, pairs);
    const uint32_t s = Scale<kFewRows>(row[0], step), s8 = Scale<kFewRows>(row8[0], step);
    a[0] = Multiply2(pairs[0], s);
    a[1] = Multiply2(pairs[1], s8);
    a[2] = Multiply2(pairs[2], s);
    a[3] = Multiply2(pairs[3], s8);
  }

 private:
  // 2^107 times the scale, twice.
  template <bool kFewRows>
  __device__ static uint32_t Scale(uint32_t bytes, int step) {
    return __byte_perm(bytes, 0, 0x4040 | step | step << 8) * PowerOfTwo<kFewRows>(4) + 0x70007000;
  }
};

// Scales are bfloat16, one for every 32 k.
template <>
struct WeightsSm90<Mode::kMxfp4, 1> {
  static constexpr int kScaleWords = 1;
  static constexpr float kFactor = 1;

  template <bool kFewRows>
  __device__ static void Decode(uint32_t codes, int step, const uint32_t (&row)[1],
                                const uint32_t (&row8)[1], uint32_t* a) {
    constexpr uint32_t k126 = 0x7e807e80;  // 2^126
    uint32_t pairs[4];
    ToPairs<kFewRows>(codes, pairs);
    const uint32_t s = Twice(row[0], step / 2), s8 = Twice(row8[0], step / 2);
    a[0] = Multiply2(Multiply2(pairs[0], k126), s);
    a[1] = Multiply2(Multiply2(pairs[1], k126), s8);
    a[2] = Multiply2(Multiply2(pairs[2], k126), s);
    a[3] = Multiply2(Multiply2(pairs[3], k126), s8);
  }
};

// Four bits. A word of scales is scale and bias, bfloat16, of 64 k, or of 32 where there are two. A
// word's four pairs are nibbles i and i + 4.
template <int kScaleWords_>
struct WeightsSm90<Mode::kAffine, kScaleWords_> {
  static constexpr int kScaleWords = kScaleWords_;
  static constexpr float kFactor = 1;

  template <bool kFewRows>
  __device__ static void Decode(uint32_t codes, int step, const uint32_t (&row)[kScaleWords],
                                const uint32_t (&row8)[kScaleWords], uint32_t* a) {
    constexpr uint32_t k128 = 0x43004300, kOne = 0x3f803f80;  // 128, whose last place is 1; 1
    const int which = kScaleWords == 1 ? 0 : step / 2;
    const uint32_t s = Twice(row[which], 0), b = Twice(row[which], 1);
    const uint32_t s8 = Twice(row8[which], 0), b8 = Twice(row8[which], 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = MultiplyAdd2((codes >> 4 * i & 0x000f000f) | k128, kOne, 0xc300c300);
      a[i] = MultiplyAdd2(q, i % 2 == 0 ? s : s8, i % 2 == 0 ? b : b8);
    }
  }
};

}  // namespace jgg::device

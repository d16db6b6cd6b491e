// fp8_quantize of one block: its scale, and the codes of its elements, exactly as jax_groupgemm's
// _fp8/blocks.py defines them. Also compiled for the host, where
// tests/fp8/test_fp8_quantize_host.py compares it with that definition.
#pragma once

#include <cstdint>

#include "quantized/device/encode.cuh"
#include "quantized/device/philox.cuh"

namespace jgg::fp8::device {

using jgg::device::Add;
using jgg::device::AsBits;
using jgg::device::AsFloat;
using jgg::device::kInfinity;
using jgg::device::Multiply;
using jgg::device::MultiplyAddTowardsZero;
using jgg::device::Permute;

enum class Element { kE4M3, kE5M2 };

template <Element kElement>
struct Format;

// kMagic * 2^e is a number whose last place is the step of codes in [2^e, 2^(e + 1)). A magnitude
// added to it is rounded to that step: the sum's mantissa counts steps, from a constant on. The
// constant is such that CodeOfSum is right. kBias and kUnbias make u steps of a random number, see
// StochasticCode.
template <>
struct Format<Element::kE4M3> {
  static constexpr int kLargest = 448, kShift = 20;
  static constexpr float kLeastNormal = 0x1p-6f, kMagic = 0x1p20f + 152 * 0.125f;
  static constexpr uint32_t kBias = 0x4180;  // 2^4, whose last place is 2^-16 of a step of 2^-3
  static constexpr float kUnbias = -(0x1p4f - 0x1p-20f);
};

template <>
struct Format<Element::kE5M2> {
  static constexpr int kLargest = 57344, kShift = 21;
  static constexpr float kLeastNormal = 0x1p-14f, kMagic = 0x1p21f + 232 * 0.25f;
  static constexpr uint32_t kBias = 0x4200;  // 2^5, likewise of a step of 2^-2
  static constexpr float kUnbias = -(0x1p5f - 0x1p-19f);
};

// ---- scales ----

// The scale of a block, from its largest magnitude. That is NaN where an element is. The scale is
// NaN where the largest magnitude is not finite.
template <Element kElement>
JGG_HOST_DEVICE float MakeScale(float largest, bool power_of_two) {
  constexpr int kLargest = Format<kElement>::kLargest;
  // A quotient that is not normal would be inexact. It becomes the least scale.
  const bool small = largest < 0x1p-80f;
  const float lifted = Multiply(largest, small ? 0x1p64f : 1.0f);
  float scale = Multiply(jgg::device::DivideBy<kLargest>(lifted), small ? 0x1p-64f : 1.0f);
  if (power_of_two) scale = AsFloat((AsBits(scale) + 0x7fffff) & kInfinity);
  scale = fmaxf(scale, 0x1p-126f);
  if (largest == 0.0f) scale = 1.0f;
  return largest < AsFloat(kInfinity) ? scale : AsFloat(0x7fc00000);
}

JGG_HOST_DEVICE bool IsDead(float scale) { return scale != scale; }  // codes are zeros

// Quotients take remainders, which must not be below the least subnormal. So elements and scale are
// multiplied by this where the scale is small. Quotients below 2^-39 may still be inexact: their
// codes are 0.
inline constexpr float kLift = 0x1p64f;

JGG_HOST_DEVICE bool IsSmall(float scale) { return scale < 0x1p-60f; }

struct Divisor {
  float value, reciprocal;
};

JGG_HOST_DEVICE Divisor MakeDivisor(float scale) {
  const float value = IsSmall(scale) ? Multiply(scale, kLift) : scale;
  return {value, jgg::device::Refined(jgg::device::Reciprocal(value), value)};
}

// 1 / scale, rounded towards zero, and what that leaves out, which is not negative. The scale is
// any that MakeScale makes of an element of 16 bits. Both are NaN where the block is dead.
struct SplitReciprocal {
  float high, low;
};

JGG_HOST_DEVICE SplitReciprocal MakeSplitReciprocal(float scale) {
  float high = jgg::device::Refined(jgg::device::Reciprocal(scale), scale);
  if (jgg::device::MultiplyAdd(high, -scale, 1.0f) < 0.0f) high = AsFloat(AsBits(high) - 1);
  return {high, Multiply(jgg::device::MultiplyAdd(high, -scale, 1.0f), high)};
}

// ---- codes ----

// Random numbers of 16 bits for half of a block of 16 elements; two to a word, the first lower.
struct RandomBits {
  uint32_t words[4];

  JGG_HOST_DEVICE RandomBits(uint64_t block, int half, uint32_t key0, uint32_t key1)
      : words{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
              static_cast<uint32_t>(half), 0} {
    JGG_UNROLL
    for (int round = 0; round < jgg::device::kPhiloxRounds; ++round) {
      jgg::device::PhiloxRound(words, key0, key1);
      jgg::device::NextPhiloxKey(&key0, &key1);
    }
  }
};

// The power of two at or below |q|, but no less than that of the least normal code.
template <Element kElement>
JGG_HOST_DEVICE float Binade(float q) {
  return fmaxf(AsFloat(AsBits(q) & kInfinity), Format<kElement>::kLeastNormal);
}

// The code that a sum with kMagic * 2^e stands for, in the lowest byte: its steps, plus its
// exponent where a code has it.
template <Element kElement>
JGG_HOST_DEVICE uint32_t CodeOfSum(float sum) {
  return AsBits(sum) + (AsBits(sum) >> Format<kElement>::kShift);
}

// The code of |q| rounded to nearest, ties to even. None saturates: no quotient of a block is more
// than a hair above the largest code's.
template <Element kElement>
JGG_HOST_DEVICE uint32_t NearestCode(float q) {
  const float magic = Multiply(Binade<kElement>(q), Format<kElement>::kMagic);
  return CodeOfSum<kElement>(Add(fabsf(q), magic));
}

// The code at or below |q| + u steps, with u = (number + 0.5) / 2^16. Rounding towards zero passes
// no multiple of a step.
template <Element kElement>
JGG_HOST_DEVICE uint32_t StochasticCode(float q, uint32_t word, int which) {
  using F = Format<kElement>;
  const float biased = AsFloat(Permute(word, F::kBias, which ? 0x5432 : 0x5410));
  const float binade = Binade<kElement>(q), u = Add(biased, F::kUnbias);
  const float up = fminf(MultiplyAddTowardsZero(binade, u, fabsf(q)), F::kLargest);
  return CodeOfSum<kElement>(MultiplyAddTowardsZero(binade, F::kMagic, up));
}

// The codes of four quotients, rounded to nearest, a byte each, with their signs.
template <Element kElement>
JGG_HOST_DEVICE uint32_t NearestCodes4(const float (&q)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890  // two in one instruction
  uint32_t four;
  if constexpr (kElement == Element::kE4M3) {
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(four)
        : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]));
  } else {
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(four)
        : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]));
  }
  return four;
#else
  uint32_t codes[4], signs[4];
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    codes[i] = NearestCode<kElement>(q[i]);
    signs[i] = AsBits(q[i]);
  }
  const uint32_t four =
      Permute(Permute(codes[0], codes[1], 0x40), Permute(codes[2], codes[3], 0x40), 0x5410);
  return jgg::device::MaskOr(jgg::device::FirstBytes(signs), 0x80808080, four);
#endif
}

// The codes of four elements of 16 bits, rounded to nearest, of a block that is not dead. Quotients
// are not always the nearest float32. But a block's scale is a number of at most 11 bits divided by
// the largest code, and no exact quotient by it is so close to where codes change that this
// decides: test_fp8_quantize_host.py has all scales. Zeros keep their sign.
template <Element kElement>
JGG_HOST_DEVICE uint32_t EncodeSplit4(const float (&x)[4], const SplitReciprocal& by) {
  float q[4];
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    q[i] = jgg::device::MultiplyAdd(x[i], by.high, Multiply(x[i], by.low));
  }
  return NearestCodes4<kElement>(q);
}

// The codes of four elements, a byte each. `random`: a number for each, where one is wanted.
template <Element kElement, bool kStochastic>
JGG_HOST_DEVICE uint32_t Encode4(const float (&x)[4], const Divisor& divisor, bool dead,
                                 const uint32_t* random) {
  float q[4];
  uint32_t signs[4], four;
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    q[i] = jgg::device::Quotient(x[i], divisor.value, divisor.reciprocal);
    signs[i] = AsBits(x[i]);
  }
  if constexpr (kStochastic) {
    uint32_t twos[2];
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      twos[i] = Permute(StochasticCode<kElement>(q[2 * i], random[i], 0),
                        StochasticCode<kElement>(q[2 * i + 1], random[i], 1), 0x40);
    }
    four = Permute(twos[0], twos[1], 0x5410);
  } else {
    JGG_UNROLL
    for (float& one : q) one = fabsf(one);  // the sign of zero may be lost
    four = NearestCodes4<kElement>(q);
  }
  const uint32_t all = jgg::device::MaskOr(jgg::device::FirstBytes(signs), 0x80808080, four);
  return dead ? 0 : all;
}

}  // namespace jgg::fp8::device

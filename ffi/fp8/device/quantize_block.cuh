// fp8_quantize of one block: its scale, and the codes of its elements, exactly as jax_groupgemm's
// _quantized/fp8.py defines them. Also compiled for the host, where
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

// The scale of a block, of its largest magnitude, which is NaN where an element is. It is NaN where
// that is not finite.
template <Element kElement>
JGG_HOST_DEVICE float MakeScale(float largest, bool power_of_two) {
  constexpr int kLargest = Format<kElement>::kLargest;
  float scale = jgg::device::DivideBy<kLargest>(largest);
  if (largest < 0x1p-80f) scale = jgg::device::Divide(largest, kLargest);
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

// The codes of two quotients, rounded to nearest, in the lowest bytes; the first is the lower one.
// The sign of zero is anything.
template <Element kElement>
JGG_HOST_DEVICE uint32_t NearestCodes2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890  // in one instruction
  uint16_t two;
  if constexpr (kElement == Element::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  }
  return two;
#else
  return Permute(NearestCode<kElement>(first), NearestCode<kElement>(second), 0x40);
#endif
}

// The codes of four elements, a byte each. `random`: a number for each, where one is wanted.
template <Element kElement, bool kStochastic>
JGG_HOST_DEVICE uint32_t Encode4(const float (&x)[4], const Divisor& divisor, bool dead,
                                 const uint32_t* random) {
  float q[4];
  uint32_t signs[4], twos[2];
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    q[i] = jgg::device::Quotient(x[i], divisor.value, divisor.reciprocal);
    signs[i] = AsBits(x[i]);
  }
  JGG_UNROLL
  for (int i = 0; i < 2; ++i) {
    if constexpr (kStochastic) {
      twos[i] = Permute(StochasticCode<kElement>(q[2 * i], random[i], 0),
                        StochasticCode<kElement>(q[2 * i + 1], random[i], 1), 0x40);
    } else {
      twos[i] = NearestCodes2<kElement>(q[2 * i], q[2 * i + 1]);
    }
  }
  const uint32_t four = Permute(twos[0], twos[1], 0x5410);
  const uint32_t all = jgg::device::MaskOr(jgg::device::FirstBytes(signs), 0x80808080, four);
  return dead ? 0 : all;
}

}  // namespace jgg::fp8::device

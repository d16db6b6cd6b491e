// nvfp4_quantize of one block: the scale of 16 elements and their codes, exactly as
// jax_groupgemm's _nvfp4_quantize.py and _philox.py define them. Also compiled for the host, where
// tests/nvfp4/test_nvfp4_quantize_host.py compares it with that definition.
#pragma once

#include <cstdint>

#include "quantized/device/encode.cuh"
#include "quantized/device/philox.cuh"

namespace jgg::nvfp4::device {

using jgg::device::Add;
using jgg::device::AsBits;
using jgg::device::AsFloat;
using jgg::device::Divide;
using jgg::device::Elements;
using jgg::device::kInfinity;
using jgg::device::LargestMagnitude;
using jgg::device::Multiply;
using jgg::device::MultiplyAdd;

inline constexpr int kBlock = 16;
inline constexpr float kLargest = 0x1.fffffep127f;
inline constexpr uint32_t kLeastNormalE4M3 = 8;

// The elements of a block, widened: exact.
using Values = Elements<DType::kF32, kBlock>;

template <DType kOf>
JGG_HOST_DEVICE Values Widen(const Elements<kOf, kBlock>& x) {
  Values values;
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) values.words[i] = AsBits(x[i]);
  return values;
}

// Bits of the largest finite magnitude; 0 if no magnitude is finite.
template <DType kOf, int kCount>
JGG_HOST_DEVICE uint32_t LargestFinite(const Elements<kOf, kCount>& x) {
  const float largest = LargestMagnitude(x);
  if (largest < AsFloat(kInfinity)) return AsBits(largest);
  uint32_t bits = 0;
  JGG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const uint32_t magnitude = AsBits(fabsf(x[i]));
    if (magnitude < kInfinity && magnitude > bits) bits = magnitude;
  }
  return bits;
}

// ---- scales ----

// The factors that make the scales of all blocks. They come from the bits of the matrix's largest
// finite magnitude.
struct MatrixScales {
  float sixth;   // encoding scale / 6
  float decode;  // 1 / encoding scale
};

JGG_HOST_DEVICE float GlobalScale(uint32_t amax) { return Divide(AsFloat(amax), 2688.0f); }

JGG_HOST_DEVICE MatrixScales MakeMatrixScales(uint32_t amax) {
  float encode = fminf(Divide(2688.0f, AsFloat(amax)), kLargest);
  if (amax == 0) encode = 1.0f;
  return {Multiply(encode, 1.0f / 6.0f), Divide(1.0f, encode)};
}

struct BlockScale {
  uint32_t byte;
  float inverse;   // what elements are multiplied by
  bool dead;       // codes are zeros
  bool saturates;  // a product may be 7 or more: only if the scale is subnormal
};

JGG_HOST_DEVICE BlockScale MakeBlockScale(float largest, const MatrixScales& matrix) {
  const bool dead = !(largest < AsFloat(kInfinity));
  const float raw = fminf(Multiply(largest, matrix.sixth), 448.0f);
  const float scale = jgg::device::RoundToE4M3(raw);
  const uint32_t byte = dead ? 0x7f : jgg::device::E4M3Code(scale) >> 24;
  const float inverse = fminf(Divide(1.0f, Multiply(scale, matrix.decode)), kLargest);
  return {byte, inverse, dead, byte < kLeastNormalE4M3 && Multiply(largest, inverse) >= 7.0f};
}

// ---- Hadamard transform ----

// An operand or a sum below the least normal number becomes a zero, of either sign.
JGG_HOST_DEVICE float AddFlushed(float a, float b) {
#ifdef __CUDA_ARCH__
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
#else
  const auto flushed = [](float v) { return std::fabs(v) < 0x1p-126f ? 0.0f : v; };
  return flushed(flushed(a) + flushed(b));
#endif
}

// y / 4. If that is below the least normal number it is a zero with the sign of y, but +0 if y is a
// zero.
JGG_HOST_DEVICE float QuarterFlushed(float y) {
#ifdef __CUDA_ARCH__
  float quarter;
  asm("fma.rn.ftz.f32 %0, %1, 0f3e800000, 0f00000000;" : "=f"(quarter) : "f"(y));
  return quarter;
#else
  if (std::fabs(y) < 0x1p-124f) return y < 0 ? -0.0f : 0.0f;
  return y * 0.25f;
#endif
}

// x @ diag(signs) @ H / 4 by butterflies of strides 1, 2, 4 and 8. Signs of zeros do not matter
// before the quarter.
JGG_HOST_DEVICE void Rotate(Values* x) {
  constexpr uint32_t kNegative = 0xd7e8;  // bit i: of element i
  float y[kBlock];
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) y[i] = kNegative >> i & 1 ? -(*x)[i] : (*x)[i];
  JGG_UNROLL
  for (int stride = 1; stride < kBlock; stride *= 2) {
    JGG_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i & stride) continue;
      const float low = y[i], high = y[i + stride];
      y[i] = AddFlushed(low, high);
      y[i + stride] = AddFlushed(low, -high);
    }
  }
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) x->words[i] = AsBits(QuarterFlushed(y[i]));
}

// Whether a value of the rotated block may be larger than `largest`: none is larger than a quarter
// of the sum of all magnitudes, but for rounding.
JGG_HOST_DEVICE bool MayExceed(const Values& x, float largest) {
  float sum = fabsf(x[0]);
  JGG_UNROLL
  for (int i = 1; i < kBlock; ++i) sum = Add(sum, fabsf(x[i]));
  return !(Multiply(sum, 0.25f * (1 + 0x1p-16f)) <= largest);
}

// Raise `bits`, a finite magnitude's, to those of the rotated block's largest finite value, if that
// is larger. If a warp has seen larger values, as it has after a while, it rotates nothing. All
// lanes call this.
JGG_HOST_DEVICE void RaiseToRotated(Values values, uint32_t* bits) {
  if (!jgg::device::AnyLane(MayExceed(values, AsFloat(*bits)))) return;
  Rotate(&values);
  const uint32_t largest = LargestFinite(values);
  if (largest > *bits) *bits = largest;
}

// ---- codes ----

// Eight codes with the signs of elements first .. first + 7.
JGG_HOST_DEVICE uint32_t PackSigned(const Values& x, int first, uint32_t codes) {
  uint32_t signs = 0;
  JGG_UNROLL
  for (int i = 7; i >= 0; --i) signs = jgg::device::FunnelLeft(x.words[first + i], signs, 4);
  return jgg::device::MaskOr(signs, 0x88888888, codes);
}

// The nearest code of y < 7, ties to even, in the last bits: y * 2, y + 2 or y / 2 + 4, whichever
// is least, each rounded where the last place is 1.
JGG_HOST_DEVICE uint32_t NearestCode(float y) {
  const uint32_t to2 = AsBits(MultiplyAdd(y, 2.0f, 0x1p23f));
  const uint32_t to4 = AsBits(Add(y, 0x1p23f + 2.0f));
  const uint32_t to6 = AsBits(MultiplyAdd(y, 0.5f, 0x1p23f + 4.0f));
  return jgg::device::Least(to2, to4, to6);
}

JGG_HOST_DEVICE void EncodeNearest(Values x, const BlockScale& scale, uint32_t* words) {
  if (scale.saturates) {
    const float six = Divide(6.0f, scale.inverse);
    JGG_UNROLL
    for (int i = 0; i < kBlock; ++i) x.words[i] = AsBits(copysignf(fminf(fabsf(x[i]), six), x[i]));
  }
  JGG_UNROLL
  for (int word = 0; word < 2; ++word) {
    uint32_t codes = 0;
    JGG_UNROLL
    for (int i = 8 * word + 7; i >= 8 * word; --i) {
      const uint32_t code = NearestCode(Multiply(fabsf(x[i]), scale.inverse));
      codes = codes * 16 + (code - AsBits(0x1p23f));
    }
    const uint32_t packed = PackSigned(x, 8 * word, codes);
    words[word] = scale.dead ? 0 : packed;
  }
}

// 16 numbers of 16 bits: Philox4x32-7 of the counters (block, 0) and (block, 1).
struct RandomBits {
  uint32_t words[8];

  JGG_HOST_DEVICE RandomBits(uint64_t block, uint32_t key0, uint32_t key1) {
    JGG_UNROLL
    for (int half = 0; half < 2; ++half) {
      words[4 * half] = static_cast<uint32_t>(block);
      words[4 * half + 1] = static_cast<uint32_t>(block >> 32);
      words[4 * half + 2] = half;
      words[4 * half + 3] = 0;
    }
    JGG_UNROLL
    for (int round = 0; round < jgg::device::kPhiloxRounds; ++round) {
      JGG_UNROLL
      for (int half = 0; half < 2; ++half) jgg::device::PhiloxRound(words + 4 * half, key0, key1);
      jgg::device::NextPhiloxKey(&key0, &key1);
    }
  }

  // 128 + number i / 2^16.
  JGG_HOST_DEVICE float Biased(int i) const {
    return AsFloat(jgg::device::Permute(words[i / 2], 0x4300, i % 2 ? 0x5432 : 0x5410));
  }
};

// The code at or below code + u, where codes grow by y * 2 up to y = 2, then by y up to 4 and by y
// / 2 up to 6, as E2M1Code of encode.cuh has them, and u is (number + 0.5) / 2^16. It is byte 2.
// Only the first sum that takes a part of y is inexact. Its last place is 2^-16, and its rounding
// makes up for the half that `biased` lacks: a whole number is even, so sums round to it from half
// a place below it on.
JGG_HOST_DEVICE uint32_t StochasticCode(float y, float biased) {
  using jgg::device::MultiplyAddSaturate;
  const float to2 = MultiplyAddSaturate(y, 0.5f, 0.0f);
  const float to4 = MultiplyAddSaturate(y, 0.5f, -1.0f);
  const float to6 = MultiplyAddSaturate(y, 0.5f, -2.0f);
  const float code = MultiplyAdd(to4, 2.0f, MultiplyAdd(to2, 4.0f, biased));
  return AsBits(MultiplyAdd(to6, 1.0f, code));
}

JGG_HOST_DEVICE void EncodeStochastic(const Values& x, const BlockScale& scale,
                                      const RandomBits& random, uint32_t* words) {
  using jgg::device::Permute;
  JGG_UNROLL
  for (int word = 0; word < 2; ++word) {
    uint32_t fours[2];  // codes 0, 2, 4 and 6, and the others, a byte each
    JGG_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t codes[4];
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * word + 2 * j + odd;
        codes[j] = StochasticCode(Multiply(fabsf(x[i]), scale.inverse), random.Biased(i));
      }
      fours[odd] =
          Permute(Permute(codes[0], codes[1], 0x0062), Permute(codes[2], codes[3], 0x0062), 0x5410);
    }
    const uint32_t packed = PackSigned(x, 8 * word, fours[0] + fours[1] * 16);
    words[word] = scale.dead ? 0 : packed;
  }
}

}  // namespace jgg::nvfp4::device

// nvfp4_quantize of one block: the scale of 16 elements and their codes, exactly as
// jax_groupgemm's _nvfp4_quantize.py and _philox.py define them. Also compiled for the host, where
// tests/test_nvfp4_quantize_host.py compares it with that definition.
#pragma once

#include <cstdint>

#include "quantized/device/encode.cuh"

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

// The elements of a block, widened: exact.
using Values = Elements<DType::kF32, kBlock>;

template <DType kOf>
JGG_HOST_DEVICE Values Widen(const Elements<kOf, kBlock>& x) {
  Values values;
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) values.words[i] = AsBits(x[i]);
  return values;
}

// Bits of the largest magnitude that is finite; 0 where none is.
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

// What the scales of all blocks are made with, of the bits of a matrix's largest finite magnitude.
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
  float inverse;  // what elements are multiplied by
  bool dead;      // codes are zeros
};

JGG_HOST_DEVICE BlockScale MakeBlockScale(float largest, const MatrixScales& matrix) {
  const bool dead = !(largest < AsFloat(kInfinity));
  const float raw = fminf(Multiply(largest, matrix.sixth), 448.0f);
  const float scale = jgg::device::RoundToE4M3(raw);
  const uint32_t byte = dead ? 0x7f : jgg::device::E4M3Code(scale) >> 24;
  return {byte, fminf(Divide(1.0f, Multiply(scale, matrix.decode)), kLargest), dead};
}

// ---- Hadamard transform ----

// Where an operand or the sum is below the least normal number, it is a zero, of either sign.
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

// x @ diag(signs) @ H / 4 by butterflies of strides 1, 2, 4 and 8. Zeros have the sign +: it is the
// last sum that gives it to them, so that their signs before are of no interest.
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
  for (int i = 0; i < kBlock; ++i) x->words[i] = AsBits(AddFlushed(Multiply(y[i], 0.25f), 0.0f));
}

// Whether a value of the rotated block may be larger than `largest`: none is larger than a quarter
// of the sum of all magnitudes, but for rounding.
JGG_HOST_DEVICE bool MayExceed(const Values& x, float largest) {
  float sum = fabsf(x[0]);
  JGG_UNROLL
  for (int i = 1; i < kBlock; ++i) sum = Add(sum, fabsf(x[i]));
  return !(Multiply(sum, 0.25f * (1 + 0x1p-16f)) <= largest);
}

// Raise `bits`, of a finite magnitude, to that of the rotated block's largest finite value, if that
// is larger. Where a warp has seen larger ones, as it has after a while, it rotates nothing. All
// lanes ask.
JGG_HOST_DEVICE void RaiseToRotated(Values values, uint32_t* bits) {
  if (!jgg::device::AnyLane(MayExceed(values, AsFloat(*bits)))) return;
  Rotate(&values);
  const uint32_t largest = LargestFinite(values);
  if (largest > *bits) *bits = largest;
}

// ---- codes ----

// code(i, |x[i]| * inverse) with the signs of x.
template <typename Code>
JGG_HOST_DEVICE void Encode(const Values& x, const BlockScale& scale, const Code& code,
                            uint32_t* words) {
  JGG_UNROLL
  for (int word = 0; word < 2; ++word) {
    uint32_t codes = 0, signs = 0;
    JGG_UNROLL
    for (int j = 7; j >= 0; --j) {
      const int i = 8 * word + j;
      codes = codes * 16 + code(i, Multiply(fabsf(x[i]), scale.inverse));
      signs = jgg::device::FunnelLeft(x.words[i], signs, 4);
    }
    words[word] = scale.dead ? 0 : jgg::device::MaskOr(signs, 0x88888888, codes);
  }
}

JGG_HOST_DEVICE void EncodeNearest(const Values& x, const BlockScale& scale, uint32_t* words) {
  const auto code = [](int, float y) { return jgg::device::E2M1Code(y) - AsBits(0x1p23f); };
  Encode(x, scale, code, words);
}

// 16 numbers of 16 bits: Philox4x32-10 of the counters (block, 0) and (block, 1).
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
    for (int round = 0; round < 10; ++round) {
      JGG_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t* c = words + 4 * half;
        const uint64_t first = uint64_t{c[0]} * 0xd2511f53u, second = uint64_t{c[2]} * 0xcd9e8d57u;
        c[0] = static_cast<uint32_t>(second >> 32) ^ c[1] ^ key0;
        c[1] = static_cast<uint32_t>(second);
        c[2] = static_cast<uint32_t>(first >> 32) ^ c[3] ^ key1;
        c[3] = static_cast<uint32_t>(first);
      }
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
  }

  // 2^23 + number i.
  JGG_HOST_DEVICE float Biased(int i) const {
    return AsFloat(jgg::device::Permute(words[i / 2], 0x4b00, i % 2 ? 0x5432 : 0x5410));
  }
};

// Codes grow by y * 2 up to y = 2, then by y up to 4 and by y / 2 up to 6, as E2M1Code of
// encode.cuh has them. The code at or below that plus u, where u is (a number of 16 bits + 0.5) /
// 2^16, in the last bits. The definition rounds y + u * step to nearest, which is only inexact for
// y < 1: so is the first sum here. The others must not reach the next code by rounding.
JGG_HOST_DEVICE uint32_t StochasticCode(float y, float biased) {
  using jgg::device::MultiplyAddSaturate;
  using jgg::device::MultiplyAddTruncate;
  const float u = MultiplyAdd(biased, 0x1p-16f, -8388607.5f * 0x1p-16f);  // exact
  const float to2 = MultiplyAddSaturate(y, 0.5f, 0.0f);
  const float to4 = MultiplyAddSaturate(y, 0.5f, -1.0f);
  const float to6 = MultiplyAddSaturate(y, 0.5f, -2.0f);
  float code = MultiplyAdd(to2, 4.0f, u);
  code = MultiplyAddTruncate(to4, 2.0f, code);
  code = MultiplyAddTruncate(to6, 1.0f, code);
  return AsBits(MultiplyAddTruncate(code, 1.0f, 0x1p23f));
}

JGG_HOST_DEVICE void EncodeStochastic(const Values& x, const BlockScale& scale,
                                      const RandomBits& random, uint32_t* words) {
  const auto code = [&](int i, float y) {
    return StochasticCode(y, random.Biased(i)) - AsBits(0x1p23f);
  };
  Encode(x, scale, code, words);
}

}  // namespace jgg::nvfp4::device

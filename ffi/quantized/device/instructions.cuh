// Instructions by name. On the host they are plain C++, so that decoding can be tested there.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

#ifdef __CUDACC__
#define JGG_HOST_DEVICE __host__ __device__ inline
#else
#define JGG_HOST_DEVICE inline
#endif
#ifdef __CUDA_ARCH__
#define JGG_UNROLL _Pragma("unroll")
#define JGG_NO_UNROLL _Pragma("unroll 1")
#else
#define JGG_UNROLL
#define JGG_NO_UNROLL
#endif

namespace jgg::device {

JGG_HOST_DEVICE float AsFloat(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

JGG_HOST_DEVICE uint32_t AsBits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

// Four bytes of the eight in (high, low), by the selector's nibbles 0 to 3. Bit 3 of a nibble asks
// for the byte's sign, eight times.
JGG_HOST_DEVICE uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (which & 7)) & 0xff;
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
#endif
}

// Bits [shift, shift + 32) of (high, low), shift < 32.
JGG_HOST_DEVICE uint32_t FunnelRight(uint32_t low, uint32_t high, int shift) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, shift);
#else
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> shift);
#endif
}

// Bits [32 - shift, 64 - shift) of (high, low), shift < 32.
JGG_HOST_DEVICE uint32_t FunnelLeft(uint32_t low, uint32_t high, int shift) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(low, high, shift);
#else
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << shift >> 32);
#endif
}

// (a & mask) | b, by one instruction, for which one of the constants has to be in a register.
JGG_HOST_DEVICE uint32_t MaskOr(uint32_t a, uint32_t mask, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
  return result;
#else
  return (a & mask) | b;
#endif
}

// a * b + c by one instruction, for which b must be no constant. Among additions and shifts, which
// run elsewhere, it is often free.
JGG_HOST_DEVICE uint32_t MultiplyAddWords(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return a * b + c;
#endif
}

// Whether it is so in any lane of the warp, all of which ask. Branches on that stay branches;
// others become predicates, and what they write then occupies registers all the time.
JGG_HOST_DEVICE bool AnyLane(bool value) {
#ifdef __CUDA_ARCH__
  return __any_sync(0xffffffffu, value);
#else
  return value;
#endif
}

// Float32, rounded to nearest, never contracted.
JGG_HOST_DEVICE float Multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

JGG_HOST_DEVICE float Add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

JGG_HOST_DEVICE float MultiplyAdd(float a, float b, float c) {  // a * b + c, rounded once
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// a * b + c, rounded once, towards zero.
JGG_HOST_DEVICE float MultiplyAddTowardsZero(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  const int rounding = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  volatile float result = std::fma(a, b, c);
  std::fesetround(rounding);
  return result;
#endif
}

JGG_HOST_DEVICE float Divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// By a constant; a / kDivisor must be normal, 0, or its exact value of no interest. One correction
// of a product with the rounded reciprocal is right for every a:
// tests/quantized/test_quantize_host.py.
template <int kDivisor>
JGG_HOST_DEVICE float DivideBy(float a) {
  constexpr float kReciprocal = 1.0f / kDivisor;
  const float quotient = Multiply(a, kReciprocal);
  return MultiplyAdd(MultiplyAdd(quotient, -kDivisor, a), kReciprocal, quotient);
}

// Within one unit in the last place; subnormals are zeros.
JGG_HOST_DEVICE float Reciprocal(float a) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  return 1.0f / a;
#endif
}

JGG_HOST_DEVICE float Saturate(float a) {  // to [0, 1]; NaN becomes 0
#ifdef __CUDA_ARCH__
  return __saturatef(a);
#else
  return a > 0.0f ? std::fmin(a, 1.0f) : 0.0f;
#endif
}

JGG_HOST_DEVICE float MultiplyAddSaturate(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
#else
  return Saturate(std::fma(a, b, c));
#endif
}

JGG_HOST_DEVICE int32_t Least(int32_t a, int32_t b, int32_t c) {  // one instruction on Hopper
#ifdef __CUDA_ARCH__
  return __vimin3_s32(a, b, c);
#else
  const int32_t two = a < b ? a : b;
  return two < c ? two : c;
#endif
}

// NaN where either is NaN.
JGG_HOST_DEVICE float Max(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? AsFloat(0x7fffffff) : std::fmax(a, b);
#endif
}

JGG_HOST_DEVICE float Min(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? AsFloat(0x7fffffff) : std::fmin(a, b);
#endif
}

// Two floats rounded to nearest, in one word.
template <DType kTo>
JGG_HOST_DEVICE uint32_t Round2(float low, float high) {
  static_assert(kTo != DType::kF32);
#ifdef __CUDA_ARCH__
  uint32_t word;
  if constexpr (kTo == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
#else
  const auto round = [](float value) -> uint32_t {
    const uint32_t bits = AsBits(value), sign = bits >> 16 & 0x8000;
    if (value != value) return 0x7fff;
    if (kTo == DType::kBF16) return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const float magnitude = std::fabs(value);
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    int exponent = -13;
    if (magnitude >= 0x1p-14f) std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
    const int unit = exponent - 11;  // of the last place, as an exponent
    const auto places = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
    return sign | (places + (static_cast<uint32_t>(unit + 24) << 10));
  };
  return round(low) | round(high) << 16;
#endif
}

JGG_HOST_DEVICE float HalfToFloat(uint32_t bits) {  // float16, in the low half
#ifdef __CUDA_ARCH__
  float value;
  asm("{ .reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(value) : "r"(bits));
  return value;
#else
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa),
                           (exponent ? exponent : 1) - 25);
#endif
}

// Either value of a pair: exact.
template <DType kOf>
JGG_HOST_DEVICE float Half(uint32_t pair, int which) {
  const uint32_t bits = which ? pair >> 16 : pair & 0xffff;
  return kOf == DType::kBF16 ? AsFloat(bits << 16) : HalfToFloat(bits);
}

// a * b + c of pairs, rounded once; subnormals count.
template <DType kOf>
JGG_HOST_DEVICE uint32_t MultiplyAdd2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(kOf != DType::kF32);
#ifdef __CUDA_ARCH__
  uint32_t pair;
  if constexpr (kOf == DType::kBF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  }
  return pair;
#else
  const auto one = [&](int i) {  // where float32 holds the sum, as it does for every caller
    return static_cast<float>(double{Half<kOf>(a, i)} * Half<kOf>(b, i) + Half<kOf>(c, i));
  };
  return Round2<kOf>(one(0), one(1));
#endif
}

// Products of pairs of bfloat16, by an instruction of sm90; subnormals count.
JGG_HOST_DEVICE uint32_t Multiply2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  return MultiplyAdd2<DType::kBF16>(a, b, 0x80008000);
#endif
}

// As MultiplyAdd2 of float16, then to [0, 1]; NaN becomes 0.
JGG_HOST_DEVICE uint32_t MultiplyAddSaturate2(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
#else
  const uint32_t pair = MultiplyAdd2<DType::kF16>(a, b, c);
  return Round2<DType::kF16>(Saturate(Half<DType::kF16>(pair, 0)),
                             Saturate(Half<DType::kF16>(pair, 1)));
#endif
}

// The larger of each pair; NaN where either is NaN.
template <DType kOf>
JGG_HOST_DEVICE uint32_t Max2(uint32_t a, uint32_t b) {
  static_assert(kOf != DType::kF32);
#ifdef __CUDA_ARCH__
  uint32_t pair;
  if constexpr (kOf == DType::kBF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return Round2<kOf>(Max(Half<kOf>(a, 0), Half<kOf>(b, 0)), Max(Half<kOf>(a, 1), Half<kOf>(b, 1)));
#endif
}

template <DType kOf>
JGG_HOST_DEVICE uint32_t Min2(uint32_t a, uint32_t b) {
  static_assert(kOf != DType::kF32);
#ifdef __CUDA_ARCH__
  uint32_t pair;
  if constexpr (kOf == DType::kBF16) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return Round2<kOf>(Min(Half<kOf>(a, 0), Half<kOf>(b, 0)), Min(Half<kOf>(a, 1), Half<kOf>(b, 1)));
#endif
}

template <DType kOf>
JGG_HOST_DEVICE uint32_t Magnitudes2(uint32_t pair) {
  static_assert(kOf != DType::kF32);
#ifdef __CUDA_ARCH__
  uint32_t result;
  if constexpr (kOf == DType::kBF16) {
    asm("abs.bf16x2 %0, %1;" : "=r"(result) : "r"(pair));
  } else {
    asm("abs.f16x2 %0, %1;" : "=r"(result) : "r"(pair));
  }
  return result;
#else
  return pair & 0x7fff7fff;
#endif
}

// The larger magnitude of each pair, with any sign; NaN where either is NaN.
template <DType kOf>
JGG_HOST_DEVICE uint32_t LargerMagnitude2(uint32_t a, uint32_t b) {
  static_assert(kOf != DType::kF32);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  if constexpr (kOf == DType::kBF16) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return Max2<kOf>(Magnitudes2<kOf>(a), Magnitudes2<kOf>(b));
#endif
}

// Two e4m3 of a word's lower or upper half as float16: exact, NaN too.
JGG_HOST_DEVICE uint32_t HalvesOfE4M3(uint32_t word, int half) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  if (half == 0) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }"
        : "=r"(pair)
        : "r"(word));
  } else {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }"
        : "=r"(pair)
        : "r"(word));
  }
  return pair;
#else
  const uint32_t codes = word >> 16 * half;
  const auto one = [](uint32_t code) -> uint32_t {
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    return MultiplyAdd2<DType::kF16>((code & 0x80) << 8 | (code & 0x7f) << 7, 0x5c00, 0x8000) &
           0xffff;
  };
  return one(codes & 0xff) | one(codes >> 8 & 0xff) << 16;
#endif
}

// The bfloat16 of an e8m0 byte.
JGG_HOST_DEVICE uint32_t Bf16OfE8M0(uint32_t byte) {
  return byte == 0 ? 0x40 : byte == 255 ? 0x7fc0 : byte << 7;
}

}  // namespace jgg::device

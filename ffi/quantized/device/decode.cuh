// Codes to values: 32 at a time, rounded once to the type of the activations, exactly as
// jax_groupgemm.dequantize does (but for the sign of zeros and the payload of NaN).
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantized/device/instructions.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

// Eight values of type kTo.
template <DType kTo>
struct Eight {
  static constexpr int kWords = kTo == DType::kF32 ? 8 : 4;
  uint32_t words[kWords];
};

template <DType kTo>
JGG_HOST_DEVICE Eight<kTo> Round8(const float (&values)[8]) {
  Eight<kTo> result;
  JGG_UNROLL
  for (int i = 0; i < Eight<kTo>::kWords; ++i) {
    if constexpr (kTo == DType::kF32) {
      result.words[i] = AsBits(values[i]);
    } else {
      result.words[i] = Round2<kTo>(values[2 * i], values[2 * i + 1]);
    }
  }
  return result;
}

// ---- scales ----

JGG_HOST_DEVICE float ScaleOfBits(uint32_t bits, DType dtype) {  // the low bits
  return dtype == DType::kF32    ? AsFloat(bits)
         : dtype == DType::kBF16 ? AsFloat(bits << 16)
                                 : HalfToFloat(bits);
}

// 2^more times a scale byte's value, E8M0: 2^(byte - 127), 255 is NaN. 0 <= more, byte + more <
// 255.
JGG_HOST_DEVICE float ScaleOfE8M0(uint32_t byte, int more = 0) {
  if (byte == 255) return AsFloat(0x7fc00000);
  const uint32_t exponent = byte + more;
  return AsFloat(exponent == 0 ? 0x00400000 : exponent << 23);
}

// E4M3 without its sign: the bits of a float whose exponent is 120 too low.
JGG_HOST_DEVICE float ScaleOfE4M3(uint32_t byte) {
  byte &= 0x7f;
  return byte == 0x7f ? AsFloat(0x7fc00000) : Multiply(AsFloat(byte << 20), 0x1p120f);
}

// The bits of the scales of 32 codes: scale and bias (affine), two scales (nvfp4), the scale. Where
// affine codes have `halves`, third and fourth are scale and bias of the upper 16; else the same.
struct ScaleBits {
  uint32_t first, second, third, fourth;
  bool halves;

  JGG_HOST_DEVICE static ScaleBits Of(uint32_t first, uint32_t second) {
    return {first, second, first, second, false};
  }
};

// The scales of 32 codes, and what belongs to them.
struct Scales {
  float first, second;  // affine: scale and bias; else: of the lower and the upper 16 codes
  float third, fourth;  // affine: scale and bias of the upper 16 codes
  // The way of decoding, by which Decode32 branches: one of these, or kFloats or kPairs plus the
  // bits of affine codes. All lanes of a warp agree.
  enum { kOneByOne = 0, kFloats = 0, kE2M1 = 9, kE4M3 = 10, kPairs = 9 };
  int way;
};

// Where the format is known before.
template <Mode kMode, int kBits>
inline constexpr int kWayOf =
    FormatTraits<kMode, kBits>::kCode == CodeType::kInteger ? kBits
    : FormatTraits<kMode, kBits>::kCode == CodeType::kE4M3  ? static_cast<int>(Scales::kE4M3)
                                                            : static_cast<int>(Scales::kE2M1);

// An exponent by which mxfp8 values are smaller than they should be until they meet their scale.
inline constexpr int kE4M3Exponent = 120;

// Whether q * scale + bias, for any code q, is what kTo's fused multiply-add gives: float32, to
// which it is rounded first, can hold it, so that it is in truth rounded once. For that their
// exponents must not be too far apart; the difference of their bits is that of their exponents, or
// almost.
template <DType kTo>
JGG_HOST_DEVICE bool FitsPairs(const Coding& coding, float scale, float bias) {
  if (kTo == DType::kF32 || coding.scale_dtype != kTo) return false;
  if (kTo == DType::kBF16 && coding.bits == 8) return false;
  constexpr int kExponents = kTo == DType::kBF16 ? 15 : 12;  // 22, less the places after the first
  const int most_below = kExponents - 1 - coding.bits, most_above = kExponents - 1;
  const uint32_t above = AsBits(fabsf(bias)) - AsBits(fabsf(scale)) + (most_below << 23);
  return fabsf(scale) < 0x1p105f &&
         (above <= static_cast<uint32_t>(most_below + most_above) << 23 || bias == 0.0f);
}

// The mode may be known only while a kernel runs: see AnyCoding.
template <DType kTo>
JGG_HOST_DEVICE Scales MakeScales(const Coding& coding, const ScaleBits& of) {
  const uint32_t first = of.first;
  switch (coding.mode) {
    case Mode::kAffine: {
      const float scale = ScaleOfBits(first, coding.scale_dtype);
      const float bias = ScaleOfBits(of.second, coding.scale_dtype);
      float upper = scale, upper_bias = bias;
      bool fits = FitsPairs<kTo>(coding, scale, bias);
      if (of.halves) {
        upper = ScaleOfBits(of.third, coding.scale_dtype);
        upper_bias = ScaleOfBits(of.fourth, coding.scale_dtype);
        fits = fits && FitsPairs<kTo>(coding, upper, upper_bias);
      }
      int way = Scales::kPairs + coding.bits;
      if (AnyLane(!fits)) {
        const bool extreme = !(fabsf(scale) < 0x1p105f) || !(fabsf(upper) < 0x1p105f);
        way = AnyLane(extreme) ? Scales::kOneByOne : Scales::kFloats + coding.bits;
      }
      return {scale, bias, upper, upper_bias, way};
    }
    case Mode::kMxfp8: {
      const bool extreme = first > 254 - kE4M3Exponent && first != 255;
      return {ScaleOfE8M0(extreme ? 0 : first, kE4M3Exponent), 0.0f, 0.0f, 0.0f,
              AnyLane(extreme) ? Scales::kOneByOne : Scales::kE4M3};
    }
    case Mode::kMxfp4: {
      const float scale = ScaleOfE8M0(first);
      return {scale, scale, 0.0f, 0.0f, Scales::kE2M1};
    }
    default: return {ScaleOfE4M3(first), ScaleOfE4M3(of.second), 0.0f, 0.0f, Scales::kE2M1};
  }
}

// ---- affine ----

// The four codes from number 4 * i on, in the low bits.
template <int kBits>
JGG_HOST_DEVICE uint32_t FourCodes(const uint32_t (&words)[kBits], int i) {
  const int at = 4 * kBits * i, word = at / 32, shift = at % 32;
  if (shift == 0) return words[word];
  if (shift + 4 * kBits <= 32) return words[word] >> shift;
  return FunnelRight(words[word], words[word + 1], shift);
}

// q * scale + bias: product and sum each rounded to float32. |scale| < 2^105.
//
// A code is not shifted into place. Where its lowest bit is bit p of a word, it becomes the low
// bits of a float between 2^(23 - p) and twice that, whose last place is 2^-p: 2^(23 - p) + q. One
// fused multiply-add takes 2^(23 - p) * scale away, which is exact, and leaves q * scale, rounded
// once.
template <DType kTo, int kBits, typename Store>
JGG_HOST_DEVICE void DecodeAffine(const uint32_t (&words)[kBits], const Scales& scales,
                                  Store store) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  constexpr int kInPlace = kBits == 8 ? 1 : kBits == 6 ? 3 : 4;  // codes that fit 23 bits, of four
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float scale = i < 2 ? scales.first : scales.third;
    const float bias = i < 2 ? scales.second : scales.fourth;
    float excess[kInPlace], values[8];
    JGG_UNROLL
    for (int j = 0; j < kInPlace; ++j) {
      excess[j] = Multiply(scale, -static_cast<float>(1 << (23 - kBits * j)));
    }
    JGG_UNROLL
    for (int j = 0; j < 8; ++j) {
      const uint32_t four = FourCodes<kBits>(words, 2 * i + j / 4);
      uint32_t wide;
      int place = j % 4;
      if constexpr (kBits == 8) {
        wide = Permute(four, 0x4b000000, 0x7650 + j % 4);
        place = 0;
      } else {
        if (place >= kInPlace) place = 0;
        const int p = kBits * place;
        const uint32_t exponent = static_cast<uint32_t>(150 - p) << 23;
        wide = MaskOr(four >> (kBits * (j % 4) - p), kMask << p, exponent);
      }
      values[j] = Add(MultiplyAdd(AsFloat(wide), scale, excess[place]), bias);
    }
    store(i, Round8<kTo>(values));
  }
}

// Eight codes in place: code j in bits 0 to 15, and code j + 4 in bits 16 to 31, from bit `at` on.
template <int kBits>
JGG_HOST_DEVICE uint32_t FarPairs(const uint32_t (&words)[kBits], int i, int j, int* at) {
  *at = kBits * j;
  if constexpr (kBits == 4) return words[i];
  if constexpr (kBits == 2) return Permute(words[i / 2], 0, i % 2 == 0 ? 0x1100 : 0x3322);
  const uint32_t lower = FourCodes<kBits>(words, 2 * i), upper = FourCodes<kBits>(words, 2 * i + 1);
  if (*at + kBits <= 16) return Permute(lower, upper, 0x5410);
  *at -= 8;
  return Permute(lower, upper, 0x6521);
}

// The same by pairs of kTo, where FitsPairs. Codes become 2^p + q, the low bits of a number whose
// last place is 1.
template <DType kTo, int kBits, typename Store>
JGG_HOST_DEVICE void DecodeAffinePairs(const uint32_t (&words)[kBits], const Scales& of,
                                       Store store) {
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x10001;
  constexpr bool kBF16 = kTo == DType::kBF16;
  constexpr uint32_t kPower = kBF16 ? 0x43004300 : 0x64006400;  // 128, or 1024
  constexpr uint32_t kOne = kBF16 ? 0x3f803f80 : 0x3c003c00, kSign = 0x80008000;
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float scale = i < 2 ? of.first : of.third, bias = i < 2 ? of.second : of.fourth;
    const uint32_t scales = Round2<kTo>(scale, scale), biases = Round2<kTo>(bias, bias);
    const auto value = [&](uint32_t wide) {
      return MultiplyAdd2<kTo>(MultiplyAdd2<kTo>(wide, kOne, kPower | kSign), scales, biases);
    };
    Eight<kTo> eight;
    if constexpr (kBits == 8) {
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) {
        eight.words[j] = value(Permute(words[2 * i + j / 2], kPower, j % 2 == 0 ? 0x5150 : 0x5352));
      }
    } else {
      uint32_t far[4];
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) {
        int at;
        const uint32_t pairs = FarPairs<kBits>(words, i, j, &at);
        far[j] = value(MaskOr(pairs >> at, kMask, kPower));
      }
      JGG_UNROLL
      for (int j = 0; j < 2; ++j) {
        eight.words[j] = Permute(far[2 * j], far[2 * j + 1], 0x5410);
        eight.words[j + 2] = Permute(far[2 * j], far[2 * j + 1], 0x7632);
      }
    }
    store(i, eight);
  }
}

// ---- e2m1 and e4m3 ----

// Eight codes e2m1 as pairs of bfloat16.
JGG_HOST_DEVICE void PairsOfE2M1(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t magnitudes = word & 0x77777777;
  JGG_UNROLL
  for (int half = 0; half < 2; ++half) {
    // The bytes of bfloat16 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    const uint32_t low = Permute(0xc0800000, 0xc0804000, magnitudes >> 16 * half);
    const uint32_t high = Permute(0x3f3f3f00, 0x40404040, magnitudes >> 16 * half);
    // A code's sign decides between 0xff and 0x80.
    const uint32_t signs = Permute(0x80808080, 0x80808080, word >> 16 * half) << 1;
    const uint32_t signed_high = MaskOr(signs, 0x80808080, high);
    pairs[2 * half] = Permute(low, signed_high, 0x5140);
    pairs[2 * half + 1] = Permute(low, signed_high, 0x7362);
  }
}

// Four codes e4m3, none of them NaN, as pairs of bfloat16, 2^-kE4M3Exponent times their value.
JGG_HOST_DEVICE void PairsOfE4M3(uint32_t word, uint32_t* pairs) {
  JGG_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = Permute(word, 0, i == 0 ? 0x1404 : 0x3424);
    pairs[i] = MaskOr(high, 0x80008000, high >> 4 & 0x07f007f0);
  }
}

// Pairs of bfloat16 times a scale, rounded once: products of so few bits are exact in float32.
template <DType kTo>
JGG_HOST_DEVICE Eight<kTo> Scale8(const uint32_t (&pairs)[4], float scale) {
  if constexpr (kTo == DType::kBF16) {
    const uint32_t both = Permute(AsBits(scale), 0, 0x3232);  // exact: a scale has 4 bits at most
    Eight<kTo> result;
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      result.words[i] = MultiplyAdd2<kTo>(pairs[i], both, 0x80008000);  // - 0: keeps the sign of 0
    }
    return result;
  } else {
    float values[8];
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = Multiply(AsFloat(pairs[i] << 16), scale);
      values[2 * i + 1] = Multiply(AsFloat(pairs[i] & 0xffff0000), scale);
    }
    return Round8<kTo>(values);
  }
}

template <DType kTo, typename Store>
JGG_HOST_DEVICE bool DecodeE2M1(const uint32_t (&words)[4], float low, float high, Store store) {
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    PairsOfE2M1(words[i], pairs);
    store(i, Scale8<kTo>(pairs, i < 2 ? low : high));
  }
  return true;
}

// False where there is a NaN.
template <DType kTo, typename Store>
JGG_HOST_DEVICE bool DecodeE4M3(const uint32_t (&words)[8], float scale, Store store) {
  uint32_t nan = 0;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) nan |= (words[i] & 0x7f7f7f7f) + 0x01010101;
  if (AnyLane(nan & 0x80808080)) return false;
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    PairsOfE4M3(words[2 * i], pairs);
    PairsOfE4M3(words[2 * i + 1], pairs + 2);
    store(i, Scale8<kTo>(pairs, scale));
  }
  return true;
}

// ---- 32 codes, and single ones ----

// The values of 32 codes, stored eight at a time: store(i, Eight<kTo>). `load` fills an array with
// the first of the codes' words. False, and nothing stored, where only DecodeOne can do it: for
// extreme scales, or codes that are NaN. kOnly: the bits of affine codes, or the one way there is,
// where they are known before, else 0.
template <DType kTo, int kOnly, typename Load, typename Store>
JGG_HOST_DEVICE bool Decode32(const Scales& scales, Load load, Store store) {
  const auto affine = [&](auto bits, bool by_pairs) {
    constexpr int kBits = decltype(bits)::value;
    if constexpr (kOnly == 0 || kOnly == kBits) {
      uint32_t words[kBits];
      load(words);
      if constexpr (kTo != DType::kF32) {
        if (by_pairs) {
          DecodeAffinePairs<kTo>(words, scales, store);
          return true;
        }
      }
      DecodeAffine<kTo>(words, scales, store);
    }
    return true;
  };
  switch (scales.way) {
    case Scales::kFloats + 2: return affine(std::integral_constant<int, 2>{}, false);
    case Scales::kFloats + 3: return affine(std::integral_constant<int, 3>{}, false);
    case Scales::kFloats + 4: return affine(std::integral_constant<int, 4>{}, false);
    case Scales::kFloats + 5: return affine(std::integral_constant<int, 5>{}, false);
    case Scales::kFloats + 6: return affine(std::integral_constant<int, 6>{}, false);
    case Scales::kFloats + 8: return affine(std::integral_constant<int, 8>{}, false);
    case Scales::kPairs + 2: return affine(std::integral_constant<int, 2>{}, true);
    case Scales::kPairs + 3: return affine(std::integral_constant<int, 3>{}, true);
    case Scales::kPairs + 4: return affine(std::integral_constant<int, 4>{}, true);
    case Scales::kPairs + 5: return affine(std::integral_constant<int, 5>{}, true);
    case Scales::kPairs + 6: return affine(std::integral_constant<int, 6>{}, true);
    case Scales::kPairs + 8: return affine(std::integral_constant<int, 8>{}, true);
    case Scales::kE2M1:
      if constexpr (kOnly == 0 || kOnly == Scales::kE2M1) {
        uint32_t words[4];
        load(words);
        return DecodeE2M1<kTo>(words, scales.first, scales.second, store);
      }
      return true;
    case Scales::kE4M3:
      if constexpr (kOnly == 0 || kOnly == Scales::kE4M3) {
        uint32_t words[8];
        load(words);
        return DecodeE4M3<kTo>(words, scales.first, store);
      }
      return true;
    default: return false;
  }
}

// The value of one code before it is rounded to its type, from the bits of its scale (and bias).
JGG_HOST_DEVICE float DecodeOne(const Coding& coding, uint32_t code, uint32_t scale,
                                uint32_t bias) {
  uint32_t pairs[4];
  switch (coding.mode) {
    case Mode::kAffine:
      return Add(Multiply(static_cast<float>(code), ScaleOfBits(scale, coding.scale_dtype)),
                 ScaleOfBits(bias, coding.scale_dtype));
    case Mode::kMxfp8:
      if ((code & 0x7f) == 0x7f) return AsFloat(0x7fc00000);
      PairsOfE4M3(code, pairs);
      return Multiply(Multiply(AsFloat(pairs[0] << 16), 0x1p120f), ScaleOfE8M0(scale));
    default:
      PairsOfE2M1(code, pairs);
      return Multiply(AsFloat(pairs[0] << 16),
                      coding.mode == Mode::kMxfp4 ? ScaleOfE8M0(scale) : ScaleOfE4M3(scale));
  }
}

}  // namespace jgg::device

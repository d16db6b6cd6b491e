// Values to codes: scales and codes exactly as jax_groupgemm.quantize defines them. Also compiled
// for the host, where tests/quantized/test_quantize_host.py compares it with that definition.
//
// `x` are the elements of a lane; its group's largest magnitude, or range, is found among all lanes
// that share it.
#pragma once

#include <cstdint>

#include "quantized/device/instructions.cuh"

namespace jgg::device {

// kCount neighbouring elements, as they lie in memory.
template <DType kOf, int kCount>
struct Elements {
  static constexpr int kWords = kOf == DType::kF32 ? kCount : kCount / 2;
  uint32_t words[kWords];

  JGG_HOST_DEVICE float operator[](int i) const {
    if constexpr (kOf == DType::kF32) {
      return AsFloat(words[i]);
    } else {
      return Half<kOf>(words[i / 2], i % 2);
    }
  }
};

inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kSign = 0x80000000;

// The bits of a value in kTo, rounded to nearest; NaN has one pattern.
template <DType kTo>
JGG_HOST_DEVICE uint32_t Narrow(float value) {
  const bool nan = value != value;
  if constexpr (kTo == DType::kF32) {
    return nan ? 0x7fc00000 : AsBits(value);
  } else {
    return nan ? (kTo == DType::kBF16 ? 0x7fc0 : 0x7e00) : Round2<kTo>(value, 0.0f) & 0xffff;
  }
}

// 1 / b within a hair of half a unit in the last place, from one within a unit.
JGG_HOST_DEVICE float Refined(float reciprocal, float b) {
  return MultiplyAdd(reciprocal, MultiplyAdd(reciprocal, -b, 1.0f), reciprocal);
}

// a / b, rounded to nearest, for a normal b that is not extreme and its refined reciprocal: how the
// compiler divides, but for the reciprocal, which many quotients share. Those that are not normal
// may be inexact.
JGG_HOST_DEVICE float Quotient(float a, float b, float reciprocal) {
  const float quotient = Multiply(a, reciprocal);
  return MultiplyAdd(MultiplyAdd(quotient, -b, a), reciprocal, quotient);
}

// ---- of a group ----

struct Range {
  float low, high;  // both NaN where there is one
};

template <DType kOf, int kCount>
JGG_HOST_DEVICE Range RangeOf(const Elements<kOf, kCount>& x) {
  if constexpr (kOf == DType::kF32) {
    Range range{x[0], x[0]};
    JGG_UNROLL
    for (int i = 1; i < kCount; ++i) range = {Min(range.low, x[i]), Max(range.high, x[i])};
    return range;
  } else {
    uint32_t low = x.words[0], high = x.words[0];
    JGG_UNROLL
    for (int i = 1; i < x.kWords; ++i) {
      low = Min2<kOf>(low, x.words[i]);
      high = Max2<kOf>(high, x.words[i]);
    }
    return {Min(Half<kOf>(low, 0), Half<kOf>(low, 1)), Max(Half<kOf>(high, 0), Half<kOf>(high, 1))};
  }
}

template <DType kOf, int kCount>
JGG_HOST_DEVICE float LargestMagnitude(const Elements<kOf, kCount>& x) {  // NaN where there is one
  if constexpr (kOf == DType::kF32) {
    float largest = fabsf(x[0]);
    JGG_UNROLL
    for (int i = 1; i < kCount; ++i) largest = Max(largest, fabsf(x[i]));
    return largest;
  } else {
    const Range range = RangeOf(x);
    return Max(fabsf(range.low), fabsf(range.high));
  }
}

// ---- e4m3 ----

// The nearest value e4m3, ties to even; 0 <= value <= 448. A sum with 2^20 times value's binade has
// e4m3's last place as its own.
JGG_HOST_DEVICE float RoundToE4M3(float value) {
  const float binade = fmaxf(AsFloat(AsBits(value) & kInfinity), 0x1p-6f);
  const float magic = Multiply(binade, 0x1p20f);
  return Add(Add(value, magic), -magic);
}

// The code of such a value, in the first byte: where the least normal exponents of e4m3 and float32
// meet, the leading bits of the two are the same.
JGG_HOST_DEVICE uint32_t E4M3Code(float value) { return AsBits(Multiply(value, 0x1p-120f)) << 4; }

// The first bytes of four words, the first lowest.
JGG_HOST_DEVICE uint32_t FirstBytes(const uint32_t (&words)[4]) {
  return Permute(Permute(words[0], words[1], 0x73), Permute(words[2], words[3], 0x73), 0x5410);
}

// Encode elements times `factor`, a power of two. Products that are not exact are 0.
template <DType kOf, int kCount>
JGG_HOST_DEVICE void EncodeE4M3(const Elements<kOf, kCount>& x, float factor, uint32_t* words) {
  const auto code = [&](int i) { return E4M3Code(RoundToE4M3(Multiply(fabsf(x[i]), factor))); };
  JGG_UNROLL
  for (int word = 0; word < kCount / 4; ++word) {
    const int i = 4 * word;
    uint32_t codes[4] = {code(i), code(i + 1), code(i + 2), code(i + 3)};
    if constexpr (kOf == DType::kF32) {
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) codes[j] = MaskOr(x.words[i + j], kSign, codes[j]);
      words[word] = FirstBytes(codes);
    } else {
      const uint32_t signs = Permute(x.words[i / 2], x.words[i / 2 + 1], 0xfdb9);
      words[word] = MaskOr(signs, 0x80808080, FirstBytes(codes));
    }
  }
}

// ---- e2m1 ----

// The nearest code, ties to even, saturating: it is y * 2 up to y = 2, then grows by y up to 4 and
// by y / 2 up to 6. Three sums with 2^23, whose last place is 1; the code is in the last bits.
JGG_HOST_DEVICE uint32_t E2M1Code(float y) {
  const float to2 = MultiplyAddSaturate(y, 0.5f, 0.0f);
  const float to4 = MultiplyAddSaturate(y, 0.5f, -1.0f);
  const float to6 = MultiplyAddSaturate(y, 0.5f, -2.0f);
  return AsBits(MultiplyAdd(to6, 1.0f, MultiplyAdd(to4, 2.0f, MultiplyAdd(to2, 4.0f, 0x1p23f))));
}

// The same, 1024 + code as float16, of a pair of values times `reciprocal`, where these may be
// rounded to float16: a tie stays one and nothing else becomes one, since 1 / reciprocal has 4 bits
// and a value has 11 at most.
template <DType kOf>
JGG_HOST_DEVICE uint32_t E2M1Codes(uint32_t pair, float reciprocal) {
  constexpr uint32_t kHalf = 0x38003800, kOne = 0x3c003c00, kTwo = 0x40004000, kFour = 0x44004400;
  constexpr uint32_t k1024 = 0x64006400, kSigns = 0x80008000;
  const uint32_t y = Round2<DType::kF16>(Multiply(fabsf(Half<kOf>(pair, 0)), reciprocal),
                                         Multiply(fabsf(Half<kOf>(pair, 1)), reciprocal));
  const uint32_t to2 = MultiplyAddSaturate2(y, kHalf, kSigns);  // - 0
  const uint32_t to4 = MultiplyAddSaturate2(y, kHalf, kSigns | kOne);
  const uint32_t to6 = MultiplyAddSaturate2(y, kHalf, kSigns | kTwo);
  uint32_t codes = MultiplyAdd2<DType::kF16>(to2, kFour, k1024);
  codes = MultiplyAdd2<DType::kF16>(to4, kTwo, codes);
  return MultiplyAdd2<DType::kF16>(to6, kOne, codes);
}

// Eight codes with the signs of the pairs they belong to. Fours: codes 1, 0, 3 and 2 as bytes.
JGG_HOST_DEVICE uint32_t PackE2M1(uint32_t low_four, uint32_t high_four, const uint32_t* pairs) {
  // Code 0 beside 1 in a byte, and 2 beside 3 in another.
  const auto beside = [](uint32_t four, uint32_t first, uint32_t second) {
    return MaskOr(Permute(first, second, 0xdf9b), 0x08080808, four) * 0x1001;
  };
  return Permute(beside(low_four, pairs[0], pairs[1]), beside(high_four, pairs[2], pairs[3]),
                 0x7531);
}

template <DType kOf, int kCount>
JGG_HOST_DEVICE void EncodeE2M1Pairs(const Elements<kOf, kCount>& x, float reciprocal,
                                     uint32_t* words) {
  JGG_UNROLL
  for (int word = 0; word < kCount / 8; ++word) {
    uint32_t codes[4];
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) codes[i] = E2M1Codes<kOf>(x.words[4 * word + i], reciprocal);
    words[word] = PackE2M1(Permute(codes[0], codes[1], 0x4602), Permute(codes[2], codes[3], 0x4602),
                           x.words + 4 * word);
  }
}

// Encode elements: y(i) is rounded, and has the sign of element i.
template <DType kOf, int kCount, typename Value>
JGG_HOST_DEVICE void EncodeE2M1(const Elements<kOf, kCount>& x, Value y, uint32_t* words) {
  JGG_UNROLL
  for (int word = 0; word < kCount / 8; ++word) {
    uint32_t codes = 0, signs = 0;
    JGG_UNROLL
    for (int i = 7; i >= 0; --i) {
      const int j = 8 * word + i;
      codes = codes * 16 + (E2M1Code(y(j)) - AsBits(0x1p23f));
      signs = FunnelLeft(AsBits(x[j]), signs, 4);
    }
    words[word] = MaskOr(signs, 0x88888888, codes);
  }
}

// ---- mxfp4 and mxfp8 ----

struct MxGroup {
  uint32_t byte;
  float factor;  // 1 / scale
  bool dead;     // codes are zeros
};

// ceil(log2(largest / most)) for the largest element, 1.5 * 2^2 or 1.75 * 2^8.
template <int kBits>
JGG_HOST_DEVICE MxGroup MakeMxGroup(float largest) {
  constexpr uint32_t kUp =
      kBits == 4 ? 0x3fffff : 0x1fffff;  // carries where the fraction is larger
  constexpr int kTop = kBits == 4 ? 2 : 8;
  const uint32_t bits = AsBits(largest);
  const int exponent = static_cast<int>((bits + kUp) >> 23) - kTop;
  uint32_t byte = exponent < 0 ? 0 : exponent;
  if (bits == 0) byte = 127;
  const bool dead = bits >= kInfinity;
  if (dead) byte = 255;
  return {byte, AsFloat((254 - byte) << 23), dead};
}

// ---- nvfp4 ----

// The reciprocal of a global scale.
struct Inverse {
  float value;     // 1 / global_scale, at most the largest float32
  uint32_t table;  // see RoundsUp
};

// Where value * inverse / scale is about in the middle between two codes, for a 16-bit value,
// whether it is rounded up. Middles are 1, 3, 5 or 7 times a power of two, so that it is a question
// of mantissas alone: bit 4 * i + j is of scales 1 + i / 8 and middles 2 * j + 1. No two values are
// close to one of these products.
template <DType kOf>
JGG_HOST_DEVICE uint32_t RoundsUp(float inverse) {
  inverse = AsFloat((AsBits(inverse) & 0x7fffff) | 0x3f800000);
  uint32_t table = 0;
  JGG_NO_UNROLL
  for (int i = 0; i < 32; ++i) {
    const float product = (8 + i / 4) * (2 * (i % 4) + 1);
    const float value = Half<kOf>(Round2<kOf>(Divide(product, inverse), 0.0f), 0);
    const float scaled = Multiply(value, inverse);
    // Ties go to even codes: to those above 3 and 7.
    if (scaled > product || (scaled == product && i % 2 == 1)) table |= 1u << i;
  }
  return table;
}

template <DType kOf>
JGG_HOST_DEVICE Inverse MakeInverse(float global_scale) {
  uint32_t bits = AsBits(Divide(1.0f, global_scale)), table = 0;
  if ((bits & ~kSign) == kInfinity) --bits;
  if constexpr (kOf != DType::kF32) table = RoundsUp<kOf>(AsFloat(bits));
  return {AsFloat(bits), table};
}

struct Nvfp4Group {
  uint32_t byte;
  float scale;       // 1 where dead
  float reciprocal;  // within a unit in the last place
  float inverse;     // of the global scale, its magnitude; 1 without one
  uint32_t table;    // as of Inverse
  bool dead;         // codes are zeros
};

template <bool kGlobal>
JGG_HOST_DEVICE Nvfp4Group MakeNvfp4Group(float largest, Inverse global) {
  const float inverse = kGlobal ? fabsf(global.value) : 1.0f;
  // Without a global scale, scales below 2^-10 are zeros, however inexact.
  float raw = DivideBy<6>(largest);
  if (kGlobal) {
    if (largest < 0x1p-100f) raw = Divide(largest, 6.0f);
    raw = Multiply(raw, inverse);
  }
  const bool nan = !(largest < AsFloat(kInfinity)) || (kGlobal && raw != raw);
  float scale = RoundToE4M3(fminf(raw, 448.0f));
  const uint32_t byte = nan ? 0x7f : E4M3Code(scale) >> 24;
  const bool dead = nan || byte == 0;
  if (dead) scale = 1.0f;
  return {byte, scale, Reciprocal(scale), inverse, global.table, dead};
}

// value * inverse / scale, exactly as the definition rounds it: of scales of 4 bits remainders are
// exact, so that an approximate reciprocal is enough. No quotient as large as 2^80 overflows.
template <bool kGlobal>
JGG_HOST_DEVICE float Nvfp4Quotient(float value, const Nvfp4Group& group) {
  value = fabsf(value);
  if (kGlobal) value = fminf(Multiply(value, group.inverse), 0x1p80f);
  return Quotient(value, group.scale, group.reciprocal);
}

// EncodeNvfp4 multiplies by this. If the compiler knew it there, it would turn multiplications into
// shifts and additions, for a busier pipe.
inline constexpr uint32_t kNvfp4Times = 4;

// With a global scale: quotients by one multiplication, which are off by less than 7 units in their
// last place. False where that is not so.
template <DType kOf, int kCount>
JGG_HOST_DEVICE bool EncodeNvfp4(const Elements<kOf, kCount>& x, float largest,
                                 const Nvfp4Group& group, uint32_t times, uint32_t* words) {
  static_assert(kOf != DType::kF32);
  constexpr uint32_t kHalf = 1 << 21, kUnits = 8;
  const float factor = Multiply(group.inverse, group.reciprocal);
  // Byte i of (upper, lower) is added to values next to the middle above code i, to round them up.
  // The middles above codes 0 to 6 are 1, 3, 5, 7, 5, 7 and 5 times a power of two.
  const uint32_t row = group.table >> (AsBits(group.scale) >> 18 & 28) & 15;
  const uint32_t lower = row * (2 * kUnits * 0x00204081) & (2 * kUnits * 0x01010101);
  const uint32_t upper = Permute(lower, 0, 0x2232);
  const uint32_t rest = (kHalf - kUnits - (lower & 2 * kUnits) * 0x01010100) * 4;
  const auto code = [&](int i) {  // in the first byte
    // Where the least normal exponents of e2m1 and float32 meet, the leading bits are the code.
    const uint32_t bits = AsBits(Multiply(Multiply(fabsf(x[i]), factor), 0x1p-126f));
    const uint32_t up = Permute(lower, upper, bits >> 22);  // and byte 0 of lower, three times
    return MultiplyAddWords(up, times, MultiplyAddWords(bits, times, rest));
  };
  JGG_UNROLL
  for (int word = 0; word < kCount / 8; ++word) {
    const int i = 8 * word;
    const uint32_t low[4] = {code(i + 1), code(i), code(i + 3), code(i + 2)};
    const uint32_t high[4] = {code(i + 5), code(i + 4), code(i + 7), code(i + 6)};
    words[word] = PackE2M1(FirstBytes(low), FirstBytes(high), x.words + 4 * word);
  }
  return Multiply(largest, factor) < 6.99f && factor > 0x1p-100f;
}

// Encode any group.
template <bool kGlobal, DType kOf, int kCount>
JGG_HOST_DEVICE void EncodeAnyNvfp4(const Elements<kOf, kCount>& x, const Nvfp4Group& group,
                                    uint32_t* words) {
  EncodeE2M1(x, [&](int i) { return Nvfp4Quotient<kGlobal>(x[i], group); }, words);
}

// ---- affine ----

template <int kBits>
struct AffineGroup {
  static constexpr float kLevels = (1 << kBits) - 1;
  float scale, bias;
  float reciprocal;  // of scale; 0 where bias is 0, and with it every code
  bool usual;        // neither extreme nor NaN
};

template <int kBits>
JGG_HOST_DEVICE AffineGroup<kBits> MakeAffineGroup(Range range) {
  constexpr int kLevels = (1 << kBits) - 1;
  const float width = Add(range.high, -range.low);
  const bool top = fabsf(range.high) >= fabsf(range.low) || range.high != range.high;
  const float edge = top ? range.high : range.low;
  const bool usual = width < 0x1p100f && fabsf(edge) < 0x1p100f;
  // A least scale of 1e-7 keeps all divisions from extremes where width and edge are not.
  float scale = DivideBy<kLevels>(width);
  if (!usual) scale = Divide(width, kLevels);
  if (scale <= 1e-7f) scale = 1e-7f;
  if (top) scale = -scale;
  float steps = rintf(Quotient(edge, scale, Refined(Reciprocal(scale), scale)));
  if (!usual) steps = rintf(Divide(edge, scale));
  if (steps == 0.0f) return {scale, 0.0f, 0.0f, usual};
  scale = Quotient(edge, steps, Refined(Reciprocal(steps), steps));
  if (!usual) scale = Divide(edge, steps);
  return {scale, edge, Refined(Reciprocal(scale), scale), usual};
}

// kCount codes as a stream of bits, in whole words but for the last; code(i) has them lowest.
template <int kBits, int kCount, typename Code>
JGG_HOST_DEVICE void PackStream(Code code, uint32_t* words) {
  constexpr int kRest = kBits * kCount % 32;
  uint32_t stream = 0;  // its last bits are the word's first
  JGG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const uint32_t next = code(i);
    const int room = 32 - kBits * i % 32;
    if (room <= kBits) words[kBits * i / 32] = FunnelRight(stream, next, room);
    stream = FunnelRight(stream, next, kBits);
  }
  if constexpr (kRest != 0) words[kBits * kCount / 32] = stream >> (32 - kRest);
}

// Encode a usual group.
template <int kBits, DType kOf, int kCount>
JGG_HOST_DEVICE void EncodeAffine(const Elements<kOf, kCount>& x, const AffineGroup<kBits>& group,
                                  uint32_t* words) {
  const auto code = [&](int i) {
    const float quotient = Quotient(Add(x[i], -group.bias), group.scale, group.reciprocal);
    return AsBits(Add(fminf(quotient, group.kLevels), 0x1p23f));  // rounded to a whole number
  };
  PackStream<kBits, kCount>(code, words);
}

// Encode any group.
template <int kBits, DType kOf, int kCount>
JGG_HOST_DEVICE void EncodeAnyAffine(const Elements<kOf, kCount>& x,
                                     const AffineGroup<kBits>& group, uint32_t* words) {
  const auto code = [&](int i) -> uint32_t {
    const float quotient = rintf(Divide(Add(x[i], -group.bias), group.scale));
    return quotient > 0.0f ? fminf(quotient, group.kLevels) : 0.0f;
  };
  PackStream<kBits, kCount>(code, words);
}

}  // namespace jgg::device

// Groups to codes and scales, in vectors: kLanes groups at a time, whose scales are computed beside
// each other, each then a register of numbers at a time.
//
// CMake compiles this file once per instruction set, with JGG_ENCODE naming the function, and
// without contracting products and sums. As in gemm.cc, nothing here may call a function of another
// header that has no copy of its own here.

#include "cpu/encode.h"

#include "cpu/encoding.h"

#ifndef JGG_ENCODE
#define JGG_ENCODE EncodeBaseline
#endif

namespace jgg::cpu {
namespace {

constexpr int kInfinityBits = 0x7f800000;
constexpr int64_t kMostSize = 128;

// Where kLanes groups, or `count` of them, begin in each array.
struct Block {
  const float* x;
  int64_t size, count;
  uint8_t *codes, *scales, *biases;
  DType dtype;
  float inverse;
  bool* odd;
};

// Numbers of a register for each group, of those that exist; others are joined as zeros.
template <typename Of, typename Join>
Vector OfGroups(const Block& block, Of of, Join join) {
  Vector all[kLanes] = {};
  for (int64_t g = 0; g < block.count; ++g) {
    const float* const x = block.x + g * block.size;
    Vector v = of(Load(x));
    for (int64_t i = kLanes; i < block.size; i += kLanes) v = join(v, of(Load(x + i)));
    all[g] = v;
  }
  return JoinLanes(all, join);
}

// The largest magnitudes, NaN among them.
Ints LargestOf(const Block& block) {
  return Bits(OfGroups(
      block, [](Vector v) { return FromBits(Magnitude(v)); },
      [](Vector a, Vector b) { return FromBits(Max(Bits(a), Bits(b))); }));
}

void StoreFloats(const Block& block, Vector v, uint8_t* to) {
  if (block.count == kLanes) return StoreAs(v, block.dtype, to);
  uint8_t all[kLanes * 4];
  StoreAs(v, block.dtype, all);
  memcpy(to, all, block.count * SizeOf(block.dtype));
}

void StoreScales(const Block& block, Ints v) {
  if (block.count == kLanes) return StoreBytes(block.scales, v);
  uint8_t all[kLanes];
  StoreBytes(all, v);
  memcpy(block.scales, all, block.count);
}

// ---- affine ----

template <int kBits>
struct Affine {
  static constexpr float kLevels = (1 << kBits) - 1;

  // Whether a code may be wrong. Quotients by a reciprocal are off by less than 2^-22 of them, so
  // that those far enough from the middle between two codes are rounded as exact ones.
  template <bool kExactly>
  static bool EncodeGroup(const Block& block, int64_t g, float scale, float bias,
                          float reciprocal) {
    constexpr float kFar = 0.5f - (kExactly ? 0.0f : kLevels * 0x1p-20f);
    const float* const x = block.x + g * block.size;
    uint8_t* to = block.codes + g * block.size * kBits / 8;
    const Vector zero = {}, levels = All(kLevels);
    const Ints far = Bits(All(kFar));
    Ints doubt = {};
    for (int64_t i = 0; i < block.size; i += kLanes) {
      const Vector v = Load(x + i) - All(bias);
      const Vector steps = kExactly ? v / All(scale) : v * All(reciprocal);
      const Vector inside = Max(zero, Min(levels, steps));  // NaN stays
      const Vector rounded = inside + All(0x1p23f);
      doubt |= far - Magnitude(inside - (rounded - All(0x1p23f)));
      StoreCodes<kBits>(to, Bits(rounded) & static_cast<int>(kLevels));
      to += kLanes * kBits / 8;
    }
    return AnyNegative(doubt);
  }

  static void Encode(const Block& block) {
    const auto same = [](Vector v) { return v; };
    const Vector low = OfGroups(block, same, [](Vector a, Vector b) { return Min(a, b); });
    const Vector high = OfGroups(block, same, [](Vector a, Vector b) { return Max(a, b); });
    const Ints below = Less(Magnitude(high), Magnitude(low));
    const Vector width = high - low, edge = Select(below, low, high);
    const Vector step = Max(width / All(kLevels), All(1e-7f));
    const Vector signed_step = Select(below, step, -step);
    const Vector steps = RoundToWhole(edge / signed_step);
    const Ints none = Less(Magnitude(steps), All(1));  // every code is 0
    const Vector scale = Select(none, signed_step, edge / Select(none, All(1.0f), steps));
    const Vector bias = Select(none, Vector{}, edge);
    const Vector reciprocal = Select(none, Vector{}, All(1.0f) / scale);
    StoreFloats(block, scale, block.scales);
    StoreFloats(block, bias, block.biases);
    const Ints usual = All(0x71800000);  // 2^100
    const Ints odd = (Magnitude(width) - usual) & (Magnitude(edge) - usual);
    float scales[kLanes], biases[kLanes], reciprocals[kLanes];
    Store(scales, scale);
    Store(biases, bias);
    Store(reciprocals, reciprocal);
    for (int64_t g = 0; g < block.count; ++g) {
      bool doubt = EncodeGroup<false>(block, g, scales[g], biases[g], reciprocals[g]);
      if (doubt && reciprocals[g] != 0.0f) {
        doubt = EncodeGroup<true>(block, g, scales[g], biases[g], 0.0f);
      }
      block.odd[g] = doubt || odd[g] >= 0;
    }
  }
};

// ---- small floats ----

// Encode group g: magnitude(x) is rounded, of numbers whose signs are those of codes. What is not
// kept becomes zeros.
template <int kBits, typename Of>
void EncodeSmall(const Block& block, int64_t g, int sign, int keep, Of magnitude) {
  const float* const x = block.x + g * block.size;
  uint8_t* to = block.codes + g * block.size * kBits / 8;
  for (int64_t i = 0; i < block.size; i += kLanes) {
    const Vector v = Load(x + i), y = magnitude(FromBits(Magnitude(v)));
    const Ints code = kBits == 4 ? E2M1::Code(y) : E4M3::Code(y);
    const Ints signs = ((Bits(v) ^ All(sign)) >> (32 - kBits)) & (1 << (kBits - 1));
    StoreCodes<kBits>(to, ((code & ((1 << (kBits - 1)) - 1)) | signs) & All(keep));
    to += kLanes * kBits / 8;
  }
}

// Powers of two: ceil(log2(largest / most)), most being 1.5 * 2^2 or 1.75 * 2^8.
template <int kBits>
struct Mx {
  static void Encode(const Block& block) {
    constexpr int kUp = kBits == 4 ? 0x3fffff : 0x1fffff;  // carries where the fraction is larger
    constexpr int kTop = kBits == 4 ? 2 : 8;
    const Ints largest = LargestOf(block), dead = Less(All(kInfinityBits - 1), largest);
    Ints byte = Max(((largest + (kUp & ~dead)) >> 23) - kTop, Ints{});
    byte = Bits(Select(Less(largest, All(1)), FromBits(All(127)), FromBits(byte)));
    byte |= dead & 255;
    StoreScales(block, byte);
    float factors[kLanes];
    int32_t keep[kLanes];
    Store(factors, FromBits(((254 - byte) & ~dead) << 23));  // 1 / scale
    Store(reinterpret_cast<float*>(keep), FromBits(~dead));
    for (int64_t g = 0; g < block.count; ++g) {
      const Vector factor = All(factors[g]);
      EncodeSmall<kBits>(block, g, 0, keep[g], [&](Vector v) { return v * factor; });
      block.odd[g] = false;
    }
  }
};

// a / b, rounded to nearest, for b of 4 bits and its reciprocal: remainders are exact.
inline Vector QuotientByFew(Vector a, Vector b, [[maybe_unused]] Vector reciprocal) {
#if defined(__FMA__) || defined(__AVX512F__)
  const Vector quotient = a * reciprocal;
  return MultiplyAdd(MultiplyAdd(quotient, -b, a), reciprocal, quotient);
#else
  return a / b;
#endif
}

struct Nvfp4 {
  static void Encode(const Block& block) {
    const Vector inverse = FromBits(Magnitude(All(block.inverse)));
    const Ints largest = LargestOf(block);
    const Vector raw = FromBits(largest) / All(6.0f) * inverse;
    const Ints nan =
        Less(All(kInfinityBits - 1), largest) | Less(All(kInfinityBits), Magnitude(raw));
    const Vector most = Min(raw, All(448.0f));
    const Ints byte = E4M3::Code(FromBits(Bits(most) & ~nan)) | (nan & 0x7f);
    StoreScales(block, byte);
    const Ints dead = nan | Less(byte, All(1));
    const Vector scale = Select(dead, All(1.0f), E4M3::Round(FromBits(Bits(most) & ~nan)));
    float scales[kLanes], reciprocals[kLanes];
    int32_t keep[kLanes];
    Store(scales, scale);
    Store(reciprocals, All(1.0f) / scale);
    Store(reinterpret_cast<float*>(keep), FromBits(~dead));
    int32_t sign;
    memcpy(&sign, &block.inverse, sizeof sign);
    sign &= INT32_MIN;
    for (int64_t g = 0; g < block.count; ++g) {
      const Vector by = All(scales[g]), reciprocal = All(reciprocals[g]);
      EncodeSmall<4>(block, g, sign, keep[g], [&](Vector v) {
        // No quotient overflows.
        return Min(QuotientByFew(Min(v * inverse, All(0x1p20f)), by, reciprocal), All(6.0f));
      });
      block.odd[g] = false;
    }
  }
};

// ---- all groups ----

template <typename Coder>
void EncodeGroups(const Groups& groups, int64_t scale_bytes, bool* odd) {
  alignas(64) float wide[kLanes * kMostSize];
  const auto* const w = static_cast<const uint8_t*>(groups.w);
  const int64_t bytes = groups.size * SizeOf(groups.dtype), codes = groups.size * groups.bits / 8;
  for (int64_t first = 0; first < groups.count; first += kLanes) {
    const int64_t count = Min(int64_t{kLanes}, groups.count - first);
    const uint8_t* const at = w + first * bytes;
    const float* x = reinterpret_cast<const float*>(at);
    if (groups.dtype != DType::kF32) {
      for (int64_t i = 0; i < count * groups.size; i += kLanes) {
        Store(wide + i, LoadFloats(at + 2 * i, groups.dtype));
      }
      x = wide;
    }
    Coder::Encode({x, groups.size, count, groups.codes + first * codes,
                   groups.scales + first * scale_bytes, groups.biases + first * scale_bytes,
                   groups.dtype, groups.inverse, odd + first});
  }
}

}  // namespace

void JGG_ENCODE(const Groups& groups, bool* odd) {
  LinearFormats::Dispatch(groups.mode, groups.bits, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
      EncodeGroups<Affine<Format::kBits>>(groups, SizeOf(groups.dtype), odd);
    } else if constexpr (Format::kScale == ScaleType::kE8M0) {
      EncodeGroups<Mx<Format::kBits>>(groups, 1, odd);
    } else {
      static_assert(Format::kScale == ScaleType::kE4M3);
      EncodeGroups<Nvfp4>(groups, 1, odd);
    }
  });
}

}  // namespace jgg::cpu

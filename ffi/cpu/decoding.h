// How lines of quantized weights become numbers, in vectors of one instruction set: as vectors.h,
// all of it is the including file's own.
#pragma once

#include <stdint.h>
#include <string.h>

#include "cpu/lines.h"
#include "cpu/vectors.h"

namespace jgg::cpu {
namespace {

int64_t WholeUnits(int64_t count) { return (count + kUnit - 1) / kUnit * kUnit; }

// ---- formats ----

Vector E4M3Magnitudes(Ints bits) {
  // Subnormals are converted from integers: as float32 subnormals they could be flushed to zero.
  const Vector normal = FromBits((bits << 20) + (120 << 23)), small = ToFloat(bits) * All(0x1p-9f);
  const Vector v = Select(Less(bits, All(8)), small, normal);
  return FromBits(Bits(v) | (Less(All(0x7e), bits) & 0x7fc00000));
}

// kLanes numbers of e4m3 codes, in order.
inline Vector LoadE4M3(const uint8_t* at) {
#if defined(__AVX512F__)
  // Shifted, a code is the float16 of its number times 2^-8, subnormals too, whatever the thread
  // makes of subnormal float32.
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                          _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m128i magnitudes = _mm_or_si128(codes, _mm_set1_epi8(INT8_MIN));
  const __mmask16 numbers = _mm_cmpneq_epi8_mask(magnitudes, _mm_set1_epi8(-1));
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  return _mm512_mask_mul_ps(nan, numbers, _mm512_cvtph_ps(halves), _mm512_set1_ps(0x1p8f));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7),
                                       _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m128i magnitudes = _mm_or_si128(codes, _mm_set1_epi8(INT8_MIN));
  const __m256i none = _mm256_cvtepi8_epi32(_mm_cmpeq_epi8(magnitudes, _mm_set1_epi8(-1)));
  const __m256i nan = _mm256_and_si256(none, _mm256_set1_epi32(0x7fc00000));
  return _mm256_or_ps(_mm256_cvtph_ps(halves) * 0x1p8f, _mm256_castsi256_ps(nan));
#else
  const Ints codes = LoadBytes(at), sign = (codes & 0x80) << 24;
  return FromBits(Bits(E4M3Magnitudes(codes & 0x7f)) | sign);
#endif
}

// The numbers of the next kLanes codes, in order or in InnerOrder.
template <CodeType kCode, int kBits, bool kInner, bool kAbove>
Vector LoadNumbers(const uint8_t* at) {
  if constexpr (kAbove) {
    return LoadAbove<kBits>(at);
  } else if constexpr (kCode == CodeType::kE4M3) {
    static_assert(kBits == 8 && InnerOrder<kBits>(1) == 1);
    return LoadE4M3(at);
  } else {
    static_assert(kCode == CodeType::kInteger);
    const Ints codes = kInner ? LoadInnerCodes<kBits>(at) : LoadCodes<kBits>(at);
    return ToFloat(kBits == 8 ? codes : codes & ((1 << kBits) - 1));
  }
}

// Whether a register or two hold all values that a group may have, so that they are looked up.
template <CodeType kCode, int kBits>
constexpr bool LooksUp() {
  return kCode == CodeType::kE2M1 || 1 << kBits <= kLanes;
}

// All numbers of a format with few codes, as often as they fill registers.
template <CodeType kCode, int kBits>
struct AllNumbers {
  static constexpr int kCount = 1 << kBits > kLanes ? 1 << kBits : kLanes;
  alignas(64) float numbers[kCount];

  constexpr AllNumbers() : numbers() {
    constexpr float kE2M1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int i = 0; i < kCount; ++i) {
      const int code = i % (1 << kBits);
      numbers[i] = kCode == CodeType::kInteger ? static_cast<float>(code)
                   : code < 8                  ? kE2M1[code]
                                               : -kE2M1[code - 8];
    }
  }
};

// How codes become values: rounded to a dtype, or not; kExact: products with scales are exact,
// because those have 16 bits; kAbove: numbers are those of LoadAbove, and biases as much lower.
template <typename Format_, DType kRounds_, bool kExact_, bool kAbove_ = false>
struct Decoding {
  using Format = Format_;
  static constexpr DType kRounds = kRounds_;
  static constexpr bool kExact = kExact_, kAbove = kAbove_;
};

// A group's scale. Numbers become values by a product with `first`, then by the sum with `second`,
// a bias. Without biases `second` is multiplied: the rest of a power of two that float32 may not
// hold, or a global scale.
struct Scale {
  Vector first, second;
};

template <typename D>
Vector ValueOf(Vector number, const Scale& scale) {
  constexpr ScaleType kScale = D::Format::kScale;
  Vector v = number * scale.first;
  if constexpr (kScale == ScaleType::kScaleAndBias) {
    v = D::kExact ? MultiplyAdd(number, scale.first, scale.second) : v + scale.second;
  }
  if constexpr (kScale == ScaleType::kE8M0 || kScale == ScaleType::kE4M3) v *= scale.second;
  if constexpr (D::kRounds == DType::kBF16) return RoundToBf16(v);
  if constexpr (D::kRounds == DType::kF16) return RoundToF16(v);
  return v;
}

// The values of one group's codes.
template <typename D>
class Group {
 public:
  using Format = typename D::Format;
  static constexpr int kBits = Format::kBits;
  static constexpr bool kLooksUp = LooksUp<Format::kCode, kBits>();
  using Known = AllNumbers<Format::kCode, kLooksUp ? kBits : 0>;
  static constexpr int kParts = Known::kCount / kLanes;

  explicit Group(const Scale& scale) : scale_(scale) {
    if constexpr (kLooksUp) {
      static constexpr Known kKnown;
      for (int part = 0; part < kParts; ++part) {
        table_[part] = ValueOf<D>(Load(kKnown.numbers + part * kLanes), scale);
      }
    }
  }

  // Those of the next kLanes codes, in order or in InnerOrder.
  template <bool kInner>
  Vector Read(const uint8_t* at) const {
    if constexpr (kLooksUp) {
      return Look(table_, kInner ? LoadInnerCodes<kBits>(at) : LoadCodes<kBits>(at));
    } else {
      return ValueOf<D>(LoadNumbers<Format::kCode, kBits, kInner, D::kAbove>(at), scale_);
    }
  }

 private:
  Scale scale_;
  Vector table_[kParts];
};

// ---- scales ----

constexpr int kMostGroups = 64;

// Those of a line's groups: in memory, as they are, or copies.
struct Scales {
  const float *first, *second;
  float copies[2][kMostGroups];
};

// kLanes scales, and so many biases.
template <ScaleType kScale>
Scale LoadScales(const Lines& lines, const uint8_t* scales, const uint8_t* biases, float factor) {
  if constexpr (kScale == ScaleType::kScaleAndBias) {
    return {LoadFloats(scales, lines.scale_dtype), LoadFloats(biases, lines.scale_dtype)};
  } else if constexpr (kScale == ScaleType::kE8M0) {
    // Small ones are 2^64 larger until they have met their numbers.
    const Ints bits = LoadBytes(scales), small = Less(bits, All(128));
    const Ints exponent = bits + (small & 64), nan = Less(All(254), bits) & 0x400000;
    return {FromBits(exponent << 23 | nan), Select(small, All(0x1p-64f), All(1.0f))};
  } else if constexpr (kScale == ScaleType::kE4M3) {
    return {E4M3Magnitudes(LoadBytes(scales) & 0x7f), All(factor)};
  } else {
    return {Load(reinterpret_cast<const float*>(scales)), Vector{}};
  }
}

// Those of a line's groups [first, first + count). NaN may have other bits than in copies.
template <ScaleType kScale, bool kAnyNan>
void ReadScales(const Lines& lines, int64_t line, int64_t first, int64_t count, Scales* out) {
  const int size = kScale == ScaleType::kScaleAndBias ? SizeOf(lines.scale_dtype)
                   : kScale == ScaleType::kFloat32    ? 4
                                                      : 1;
  int64_t row = line;
  float factor = 1.0f;
  if constexpr (kScale == ScaleType::kFloat32) {
    const int64_t matrix = line / lines.lines;
    row = matrix * lines.blocks + (line - matrix * lines.lines) / lines.lines_each;
  }
  if constexpr (kScale == ScaleType::kE4M3) {
    if (lines.factors != nullptr) {
      factor = lines.factors[line / lines.lines * lines.factor_stride];
    }
  }
  const int64_t begin = (row * lines.line_scales + first) * size;
  const uint8_t *const scales = lines.scales + begin, *const end = lines.scales_end;
  const uint8_t* const biases = lines.biases == nullptr ? scales : lines.biases + begin;
  if (kScale == ScaleType::kScaleAndBias && kAnyNan && lines.scale_dtype == DType::kF32) {
    out->first = reinterpret_cast<const float*>(scales);
    out->second = reinterpret_cast<const float*>(biases);
    return;
  }
  out->first = out->copies[0];
  out->second = out->copies[1];
  for (int64_t i = 0; i < count; i += kLanes) {
    Scale scale;
    if (i + kLanes <= count || end - (scales + i * size) >= kLanes * size) {
      scale = LoadScales<kScale>(lines, scales + i * size, biases + i * size, factor);
    } else {  // there may be no more in memory
      uint8_t some[2][kLanes * 4] = {};
      memcpy(some[0], scales + i * size, (count - i) * size);
      memcpy(some[1], biases + i * size, (count - i) * size);
      scale = LoadScales<kScale>(lines, some[0], some[1], factor);
    }
    Store(out->copies[0] + i, scale.first);
    Store(out->copies[1] + i, scale.second);
  }
}

// ---- decoding ----

// Values go to memory, or where row.h says. (Passed on by value, which keeps it in registers.)

struct ToMemory {
  static constexpr bool kInner = false, kInARow = false;
  float* out;

  void operator()(Vector v) {
    Store(out, v);
    out += kLanes;
  }
};

// Lines that follow each other, which a row of x meets together: what a line takes before and after
// its codes is as long as half of them.
constexpr int kLinesTogether = 4;

// How many bytes ahead codes and scales are asked for, where lines are read one after the other.
// Processors fetch ahead within a page only, and codes, scales and biases are three streams. A
// piece at a time: many requests at once keep other loads waiting.
struct Ahead {
  int64_t codes = 0, scales = 0;

  explicit Ahead(const Lines& lines) {
    constexpr int64_t kLeast = 2048;
    if (lines.line_bytes == 0) return;
    // Lines: at least those that are read together.
    const int64_t least = kLinesTogether * lines.line_bytes;
    const int64_t count = (kLeast + least - 1) / least * kLinesTogether;
    codes = count * lines.line_bytes;
    if (lines.biases != nullptr) scales = count * lines.line_scales * SizeOf(lines.scale_dtype);
  }
};

constexpr int64_t kCacheLine = 64;

// Asks for `count` bytes that are `ahead` bytes behind `at`.
__attribute__((always_inline)) inline void Fetch(const void* at, int64_t ahead, int64_t count) {
  // As a number: a table may end before that.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at) + ahead;
  for (int64_t i = 0; i < count; i += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + i), 0, 2);  // to the L2 cache
  }
}

// Whole groups of `kVectors` registers.
template <typename D, int kVectors, typename To>
To DecodeGroups(const Scales& scales, int64_t groups, const uint8_t* at, To to) {
  for (int64_t g = 0; g < groups; ++g) {
    const Group<D> values({All(scales.first[g]), All(scales.second[g])});
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      to(values.template Read<To::kInner>(at));
      at += kLanes * D::Format::kBits / 8;
    }
  }
  return to;
}

// Elements [first, first + count) of a line, and more up to a whole unit. Their codes are at `at`.
template <typename D, typename To>
To DecodeFrom(const Lines& lines, int64_t line, int64_t first, int64_t count, const uint8_t* at,
              To to) {
  constexpr int kBits = D::Format::kBits;
  constexpr ScaleType kScale = D::Format::kScale;
  const int64_t end = first + WholeUnits(count), last = lines.line_scales - 1;
  const auto group_of = [&](int64_t i) {
    return lines.group_bits < 0 ? i / lines.group : i >> lines.group_bits;
  };
  for (int64_t i = first; i < end;) {
    const int64_t group = group_of(i);
    const int64_t groups = Min(kMostGroups, Min(group_of(end - 1), last) - group + 1);
    const int64_t codes = groups * lines.group;
    Scales scales;
    ReadScales<kScale, D::kRounds == DType::kF32>(lines, line, group, groups, &scales);
    if constexpr (!To::kInARow && kScale != ScaleType::kFloat32) {
      if (i == group * lines.group && end - i >= codes) {
        switch (lines.group) {
          case 16: to = DecodeGroups<D, 16 / kLanes>(scales, groups, at, to); break;
          case 32: to = DecodeGroups<D, 32 / kLanes>(scales, groups, at, to); break;
          case 64: to = DecodeGroups<D, 64 / kLanes>(scales, groups, at, to); break;
          default: to = DecodeGroups<D, 128 / kLanes>(scales, groups, at, to);
        }
        i += codes;
        at += codes * kBits / 8;
        continue;
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      const Group<D> values({All(scales.first[g]), All(scales.second[g])});
      // A line that ends within a unit ends within its last group.
      const int64_t stop = group + g == last ? end : Min((group + g + 1) * lines.group, end);
      for (; i < stop; i += kLanes, at += kLanes * kBits / 8) {
        if constexpr (To::kInARow) {
          if (i % 64 == 0) Fetch(at, to.ahead.codes, 8 * kBits);
        }
        to(values.template Read<To::kInner>(at));
      }
    }
  }
  return to;
}

template <typename D, typename To>
To Decode(const Lines& lines, int64_t line, int64_t first, int64_t count, To to) {
  constexpr int kBits = D::Format::kBits;
  constexpr int64_t kTail = 64;  // codes, of which all others' overread is among theirs
  const uint8_t* at = lines.codes + line * lines.line_bytes + first * kBits / 8;
  const int64_t bytes = (count * kBits + 7) / 8;
  if (at + bytes + kOverread <= lines.codes_end) {
    return DecodeFrom<D>(lines, line, first, count, at, to);
  }
  const int64_t before = count > kTail ? WholeUnits(count - kTail) : 0;
  to = DecodeFrom<D>(lines, line, first, before, at, to);
  uint8_t tail[kTail * kBits / 8 + 2 * kOverread] = {};
  memcpy(tail, at + before * kBits / 8, bytes - before * kBits / 8);
  return DecodeFrom<D>(lines, line, first + before, count - before, tail, to);
}

template <typename D>
void ReadLine(const void* lines, int64_t line, int64_t first, int64_t count, float* out) {
  Decode<D>(*static_cast<const Lines*>(lines), line, first, count, ToMemory{out});
}

}  // namespace
}  // namespace jgg::cpu

// Vectors of the instruction set that a file is compiled for, and how they take codes apart. For
// files that are compiled once per instruction set: all of it is the including file's own.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/dtype.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no function that takes vectors leaves a file
// Within GCC 12's own instructions.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace jgg::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // two registers each, if they have four lanes
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Vector Load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
inline void Store(float* at, Vector v) { *reinterpret_cast<Vector*>(at) = v; }
inline Vector All(float v) { return v - Vector{}; }
inline Ints Bits(Vector v) { return reinterpret_cast<Ints>(v); }
inline Vector FromBits(Ints v) { return reinterpret_cast<Vector>(v); }
inline Vector ToFloat(Ints v) { return __builtin_convertvector(v, Vector); }
// All bits of a lane where a < b, whose difference fits, or none. (GCC compares vectors that take
// two registers number by number.)
inline Ints Less(Ints a, Ints b) { return (a - b) >> 31; }
inline Ints All(int32_t v) { return v - Ints{}; }
// yes or no, lane by lane.
inline Vector Select(Ints condition, Vector yes, Vector no) {
  return FromBits((condition & Bits(yes)) | (~condition & Bits(no)));
}

inline bool AnyNegative(Ints v) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(v)) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= v[i];
  return all < 0;
#endif
}

// a * b + c, rounded once where the instruction set can.
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline float Sum(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// ---- float16 and bfloat16 ----

inline float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const uint32_t exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;  // Inf and NaN
  const uint32_t normal = sign | ((magnitude << 13) + exponent);
  float value, unit;
  memcpy(&value, &normal, 4);
  // Subnormals are converted from integers: as float32 subnormals they could be flushed to zero.
  const uint32_t signed_one = sign | 0x3f800000u;
  memcpy(&unit, &signed_one, 4);
  return magnitude < 0x400u ? unit * (static_cast<float>(magnitude) * 0x1p-24f) : value;
}

inline Vector LoadHalves(const uint16_t* at) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
  Vector v;
  for (int i = 0; i < kLanes; ++i) v[i] = HalfToFloat(at[i]);
  return v;
#endif
}

inline Vector LoadBf16(const uint16_t* at) {
  typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
  Shorts shorts;
  memcpy(&shorts, at, sizeof shorts);
  return FromBits(__builtin_convertvector(shorts, Ints) << 16);
}

#if defined(__SSE2__) && !defined(__AVX2__)
// The first kLanes bytes. (GCC would widen one after the other, through memory.)
inline Ints Widened(__m128i bytes) {
  const __m128i zero = _mm_setzero_si128(), shorts = _mm_unpacklo_epi8(bytes, zero);
  const __m128i halves[2] = {_mm_unpacklo_epi16(shorts, zero), _mm_unpackhi_epi16(shorts, zero)};
  Ints ints;
  memcpy(&ints, halves, sizeof ints);
  return ints;
}
#endif

inline Ints LoadBytes(const uint8_t* at) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes));
#elif defined(__SSE2__)
  return Widened(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
  Bytes bytes;
  memcpy(&bytes, at, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints);
#endif
}

// To nearest, ties to even. A NaN stays one unless all bits of its fraction are set.
inline Vector RoundToBf16(Vector v) {
  const Ints bits = Bits(v);
#if defined(__AVX512F__)
  // An odd number is one more: an instruction less than with its bit taken out.
  const __m512i i = reinterpret_cast<__m512i>(bits), one = _mm512_set1_epi32(1);
  const __mmask16 odd = _mm512_test_epi32_mask(i, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_add_epi32(i, _mm512_set1_epi32(0x7fff));
  const Ints sum = reinterpret_cast<Ints>(_mm512_mask_add_epi32(half, odd, half, one));
#else
  const Ints sum = bits + 0x7fff + ((bits >> 16) & 1);
#endif
  return FromBits(sum & static_cast<int32_t>(0xffff0000u));
}

inline Vector RoundToF16(Vector v) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Ints bits = Bits(v), sign = bits & INT32_MIN, magnitude = bits & INT32_MAX;
  // Normal numbers: 13 bits less. Below 2^-14 the last place is 2^-24, which is that of 0.5.
  const Ints normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fff;
  const Ints small = Bits((FromBits(magnitude) + 0.5f) - 0.5f);
  const Ints infinity = All(0x7f800000);
  Vector rounded = Select(Less(magnitude, All(0x38800000)), FromBits(small), FromBits(normal));
  rounded = Select(Less(All(0x477fffff), Bits(rounded)), FromBits(infinity), rounded);
  rounded = Select(Less(infinity, magnitude), FromBits(magnitude), rounded);
  return FromBits(Bits(rounded) | sign);
#endif
}

// The bits of numbers that float16 holds, or infinity or NaN.
inline void StoreHalves(uint16_t* to, Vector v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Ints bits = Bits(RoundToF16(v)), magnitude = bits & INT32_MAX;
  // 2^-14 is the smallest number whose bits are shifted; those below are whole times 2^-24.
  const Ints normal = ((magnitude - 0x38000000) >> 13) & 0x7fff;
  const Ints small = __builtin_convertvector(FromBits(magnitude) * 0x1p24f, Ints);
  const Vector half = Select(Less(magnitude, All(0x38800000)), FromBits(small), FromBits(normal));
  const Ints special = Less(All(0x7f7fffff), magnitude);  // Inf and NaN
  const Ints of_special = 0x7c00 | (Less(All(0x7f800000), magnitude) & 0x200);
  const Ints out = (special & of_special) | (~special & Bits(half)) | ((bits >> 16) & 0x8000);
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint16_t>(out[i]);
#endif
}

inline void StoreBf16(uint16_t* to, Vector v) {
  typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
  const Shorts shorts = __builtin_convertvector((Bits(RoundToBf16(v)) >> 16) & 0xffff, Shorts);
  memcpy(to, &shorts, sizeof shorts);
}

// ---- numbers of a dtype ----

constexpr int SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

inline Vector LoadFloats(const uint8_t* at, DType dtype) {
  if (dtype == DType::kBF16) return LoadBf16(reinterpret_cast<const uint16_t*>(at));
  if (dtype == DType::kF16) return LoadHalves(reinterpret_cast<const uint16_t*>(at));
  const Vector v = Load(reinterpret_cast<const float*>(at));
  // One NaN, which may be rounded.
  const Ints infinity = All(0x7f800000);
  return Select(Less(infinity, Bits(v) & INT32_MAX), FromBits(All(0x7fc00000)), v);
}

inline void StoreAs(Vector v, DType dtype, uint8_t* to) {
  v = Select(Less(All(0x7f800000), Bits(v) & INT32_MAX), FromBits(All(0x7fc00000)), v);
  if (dtype == DType::kBF16) return StoreBf16(reinterpret_cast<uint16_t*>(to), v);
  if (dtype == DType::kF16) return StoreHalves(reinterpret_cast<uint16_t*>(to), v);
  Store(reinterpret_cast<float*>(to), v);
}

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- codes ----

// kLanes codes of a stream, from a whole byte on: the low bits of each lane, below anything. Reads
// kOverread bytes at most.
constexpr int kOverread = 16;

template <int kBits>
inline Ints LoadCodes(const uint8_t* at) {
  if constexpr (kBits == 8) return LoadBytes(at);
#if defined(__AVX2__)
  if constexpr (kBits * kLanes == 32) {
    int32_t word;
    memcpy(&word, at, sizeof word);
    const Ints lane = {0,  1,  2,  3,  4,
                       5,  6,  7,
#if defined(__AVX512F__)
                       8,  9,  10, 11, 12,
                       13, 14, 15
#endif
    };
    typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
    return reinterpret_cast<Ints>(reinterpret_cast<Words>(All(word)) >>
                                  reinterpret_cast<Words>(lane * kBits));
  }
  // Two bytes for each lane, then its shift. A row of 16 bytes has all of the codes.
  struct Plan {
    alignas(64) int32_t bytes[kLanes], shift[kLanes];
    constexpr Plan() : bytes(), shift() {
      for (int i = 0; i < kLanes; ++i) {
        const int byte = i * kBits / 8;
        bytes[i] = byte | (byte + 1 < 16 ? byte + 1 : 0x80) << 8 | static_cast<int>(0x80800000u);
        shift[i] = i * kBits % 8;
      }
    }
  };
  static constexpr Plan kPlan;
#if defined(__AVX512F__)
  const __m512i row = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return reinterpret_cast<Ints>(_mm512_srlv_epi32(
      _mm512_shuffle_epi8(row, _mm512_load_si512(kPlan.bytes)), _mm512_load_si512(kPlan.shift)));
#else
  const __m256i row =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  const auto load = [](const int32_t* of) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(of));
  };
  return reinterpret_cast<Ints>(
      _mm256_srlv_epi32(_mm256_shuffle_epi8(row, load(kPlan.bytes)), load(kPlan.shift)));
#endif
#else
#if defined(__SSE2__)
  if constexpr (kBits == 4) {  // a byte for each code
    int32_t word;
    memcpy(&word, at, sizeof word);
    const __m128i v = _mm_cvtsi32_si128(word), low = _mm_set1_epi8(15);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(v, 4), low);
    return Widened(_mm_unpacklo_epi8(_mm_and_si128(v, low), odd));
  }
#endif
  uint64_t word = 0;  // all of them
  for (int i = 0; i < kBits; ++i) word |= uint64_t{at[i]} << 8 * i;
  typedef int32_t Half __attribute__((vector_size(kLanes * 2)));
  constexpr int kHalf = kLanes / 2;
  Half halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = Half{static_cast<int32_t>(word >> (kHalf * i) * kBits),
                     static_cast<int32_t>(word >> (kHalf * i + 1) * kBits),
                     static_cast<int32_t>(word >> (kHalf * i + 2) * kBits),
                     static_cast<int32_t>(word >> (kHalf * i + 3) * kBits)};
  }
  Ints codes;
  memcpy(&codes, halves, sizeof codes);
  return codes;
#endif
}

// The same codes as LoadCodes in the order that takes the least: number i of every kLanes is that
// of code InnerOrder(i). Reads no more.
template <int kBits>
constexpr int InnerOrder(int i) {
#if defined(__AVX512F__)
  if constexpr (kBits == 4) return i / 2 + i % 2 * (kLanes / 2);
#endif
  return i;
}

template <int kBits>
inline Ints LoadInnerCodes(const uint8_t* at) {
#if defined(__AVX512F__)
  if constexpr (kBits == 4) {  // each pair of lanes has both words: a load does that
    int64_t words;
    memcpy(&words, at, sizeof words);
    const __m512i shift =
        _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    return reinterpret_cast<Ints>(_mm512_srlv_epi32(_mm512_set1_epi64(words), shift));
  }
#endif
  return LoadCodes<kBits>(at);
}

// kLanes numbers, number i of which is InnerOrder(i) of those in memory.
template <int kBits>
inline Vector LoadInInnerOrder(const float* at) {
#if defined(__AVX512F__)
  if constexpr (InnerOrder<kBits>(1) != 1) {
    Ints order;
    for (int i = 0; i < kLanes; ++i) order[i] = InnerOrder<kBits>(i);
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(order), Load(at));
  }
#endif
  return Load(at);
}

// Whether LoadAbove takes less than LoadCodes and a conversion.
template <int kBits>
constexpr bool HasAbove() {
#if defined(__AVX512F__)
  return kBits == 5 || kBits == 6;
#else
  return false;
#endif
}

// 2^kBits + code of kLanes codes: codes are the first bits of the fraction. Reads no more than
// LoadCodes.
template <int kBits>
inline Vector LoadAbove(const uint8_t* at) {
  static_assert(HasAbove<kBits>());
#if defined(__AVX512F__)
  struct Plan {
    alignas(64) int32_t bytes[kLanes], shift[kLanes];
    constexpr Plan() : bytes(), shift() {
      for (int i = 0; i < kLanes; ++i) {
        const int byte = i * kBits / 8;  // it and the next one become bits 8 to 23
        bytes[i] = 0x80 | byte << 8 | (byte + 1) << 16 | static_cast<int>(0x80000000u);
        shift[i] = 23 - kBits - 8 - i * kBits % 8;
      }
    }
  };
  static constexpr Plan kPlan;
  const __m512i row = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  const __m512i codes = _mm512_sllv_epi32(_mm512_shuffle_epi8(row, _mm512_load_si512(kPlan.bytes)),
                                          _mm512_load_si512(kPlan.shift));
  const __m512i fraction = _mm512_set1_epi32(((1 << kBits) - 1) << (23 - kBits));
  const __m512i exponent = _mm512_set1_epi32((127 + kBits) << 23);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(codes, fraction, exponent, 0xea));
#else
  return Vector{};
#endif
}

// table[low bits of index], of kParts * kLanes numbers; a smaller table is there several times.
template <int kParts>
inline Vector Look(const Vector (&table)[kParts], Ints index) {
  static_assert(kParts == 1 || kParts == 2);
#if defined(__AVX512F__)
  static_assert(kParts == 1);
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), table[0]);
#elif defined(__AVX2__)
  const __m256i i = reinterpret_cast<__m256i>(index);
  const __m256 low = _mm256_permutevar8x32_ps(table[0], i);
  if constexpr (kParts == 1) return low;
  const __m256 high = _mm256_permutevar8x32_ps(table[kParts - 1], i);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
#else
  float numbers[kParts * kLanes];
  memcpy(numbers, table, sizeof numbers);
  int32_t at[kLanes];
  memcpy(at, &index, sizeof at);
  const auto number = [&](int i) { return numbers[at[i] & (kParts * kLanes - 1)]; };
  return Vector{number(0), number(1), number(2), number(3),
                number(4), number(5), number(6), number(7)};
#endif
}

}  // namespace
}  // namespace jgg::cpu

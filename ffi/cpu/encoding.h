// Vector operations of encoding, in one instruction set. As with vectors.h, all of it is the
// including file's own.
#pragma once

#include <stdint.h>
#include <string.h>

#include "cpu/vectors.h"

namespace jgg::cpu {
namespace {

// ---- lanes ----

// b where one of them is NaN, as the instruction has it.
inline Vector Min(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = a[i] < b[i] ? a[i] : b[i];
  return a;
#endif
}

inline Vector Max(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
#endif
}

inline Ints Max(Ints a, Ints b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(
      _mm512_max_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(
      _mm256_max_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  for (int i = 0; i < kLanes; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
#endif
}

inline Vector RoundToWhole(Vector v) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Ints sign = Bits(v) & INT32_MIN, magnitude = Bits(v) & INT32_MAX;
  const Vector whole = (FromBits(magnitude) + 0x1p23f) - 0x1p23f;
  const Vector small = FromBits(Bits(whole) | sign);
  return Select(Less(magnitude, All(0x4b000000)), small, v);  // 2^23
#endif
}

inline Ints Magnitude(Vector v) { return Bits(v) & INT32_MAX; }

// The lanes of a, then of b, of which the others are: of even and of odd number.
struct Halves {
  Vector even, odd;
};

inline Halves HalvesOf(Vector a, Vector b) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)};
#elif defined(__AVX2__)
  const auto in_order = [](__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  };
  return {in_order(_mm256_shuffle_ps(a, b, 0x88)), in_order(_mm256_shuffle_ps(a, b, 0xdd))};
#else
  float lanes[2 * kLanes];
  Store(lanes, a);
  Store(lanes + kLanes, b);
  Halves halves{};
  for (int i = 0; i < kLanes; ++i) {
    halves.even[i] = lanes[2 * i];
    halves.odd[i] = lanes[2 * i + 1];
  }
  return halves;
#endif
}

// Lane i is all lanes of v[i], joined.
template <typename Join>
Vector JoinLanes(Vector (&v)[kLanes], Join join) {
#pragma GCC unroll 4
  for (int count = kLanes / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const Halves halves = HalvesOf(v[2 * i], v[2 * i + 1]);
      v[i] = join(halves.even, halves.odd);
    }
  }
  return v[0];
}

// ---- codes ----

// kLanes codes, below 2^kBits, as kLanes * kBits / 8 bytes of a stream.
template <int kBits>
inline void StoreCodes(uint8_t* to, Ints codes) {
#if defined(__AVX512F__)
  __m128i some = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes));
  if constexpr (kBits == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), some);
  } else {  // codes that neighbour each other, then pairs, then fours
    some = _mm_maddubs_epi16(some, _mm_set1_epi16(1 | 256 << kBits));
    some = _mm_madd_epi16(some, _mm_set1_epi32(1 | 65536 << 2 * kBits));
    const auto store = [to](int64_t fours, int i) {
      const uint64_t bits = static_cast<uint64_t>(fours);
      const uint64_t eight = (bits & 0xffffffff) | bits >> 32 << 4 * kBits;
      memcpy(to + i * kBits, &eight, kBits);
    };
    store(_mm_cvtsi128_si64(some), 0);
    store(_mm_extract_epi64(some, 1), 1);
  }
#elif defined(__AVX2__)
  const __m256i all = reinterpret_cast<__m256i>(codes);
  __m128i some = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  if constexpr (kBits == 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(some, some));
  } else {
    some = _mm_madd_epi16(some, _mm_set1_epi32(1 | 65536 << kBits));
    some = _mm_packus_epi32(some, some);
    some = _mm_madd_epi16(some, _mm_set1_epi32(1 | 65536 << 2 * kBits));
    const uint64_t bits = static_cast<uint64_t>(_mm_cvtsi128_si64(some));
    const uint64_t eight = (bits & 0xffffffff) | bits >> 32 << 4 * kBits;
    memcpy(to, &eight, kBits);
  }
#else
  uint64_t eight = 0;
  for (int i = 0; i < kLanes; ++i) eight |= static_cast<uint64_t>(codes[i]) << i * kBits;
  for (int i = 0; i < kBits; ++i) to[i] = static_cast<uint8_t>(eight >> 8 * i);
#endif
}

// kLanes numbers below 256, as bytes.
inline void StoreBytes(uint8_t* to, Ints v) { StoreCodes<8>(to, v); }

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

// A small float's mantissa bits, and the exponent of its least normal number as float32 has it.
template <int kMantissa_, int kLeast_>
struct SmallFloat {
  static constexpr int kRest = 23 - kMantissa_, kLeast = kLeast_ << 23;

  // A number whose last place is that of codes next to v. (What an infinity has does not count.)
  static Words MagicOf(Vector v) {
    return reinterpret_cast<Words>(Max(Bits(v) & 0x7f800000, All(kLeast))) + (kRest << 23);
  }

  // The nearest code, ties to even. 0 <= v, at most the largest number.
  static Ints Code(Vector v) {
    const Words magic = MagicOf(v);
    const Ints places = Bits(v + reinterpret_cast<Vector>(magic)) & 31;
    return places + reinterpret_cast<Ints>((magic - (kLeast + (kRest << 23))) >> kRest);
  }

  // Its number.
  static Vector Round(Vector v) {
    const Vector magic = reinterpret_cast<Vector>(MagicOf(v));
    return (v + magic) - magic;
  }
};

using E2M1 = SmallFloat<1, 127>;
using E4M3 = SmallFloat<3, 121>;

}  // namespace
}  // namespace jgg::cpu

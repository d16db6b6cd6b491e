// A thread's codes of a tile in layout "sm90" (quantized/gemm_sm90.h): loads and stores, affine
// codes to pairs of bfloat16, and pairs of affine codes to words. The layout's definition,
// jax_groupgemm/_quantized/prepack.py, says where each is: `_pieces`, `_fields`. Plain C++ on the
// host, where tests of tests/quantized (test_decode.py, test_prepack_host.py) try every width.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantized/device/code_pairs.cuh"

namespace jgg::device {

// kCount words by one load.
template <int kCount>
JGG_HOST_DEVICE void LoadWords(const char* from, uint32_t* to) {
#ifdef __CUDA_ARCH__
  if constexpr (kCount == 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
  } else if constexpr (kCount == 2) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    to[0] = words.x, to[1] = words.y;
  } else {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  }
#else
  std::memcpy(to, from, 4 * kCount);
#endif
}

// As many words as a code has bits; threads' first fours lie beside each other, and so on.
template <int kBits>
JGG_HOST_DEVICE void LoadCodes(const char* tile, int thread, uint32_t (&words)[kBits]) {
  constexpr int kFours = kBits / 4 * 4;
  JGG_UNROLL
  for (int i = 0; i < kFours; i += 4) LoadWords<4>(tile + 512 * i + 16 * thread, words + i);
  if constexpr (kBits & 2) LoadWords<2>(tile + 512 * kFours + 8 * thread, words + kFours);
  if constexpr (kBits & 1) {
    LoadWords<1>(tile + 512 * (kBits - 1) + 4 * thread, words + kBits - 1);
  }
}

template <int kCount>
JGG_HOST_DEVICE void StoreWords(char* to, const uint32_t* from) {
#ifdef __CUDA_ARCH__
  if constexpr (kCount == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = from[0];
  }
#else
  std::memcpy(to, from, 4 * kCount);
#endif
}

template <int kBits>
JGG_HOST_DEVICE void StoreCodes(char* tile, int thread, const uint32_t (&words)[kBits]) {
  constexpr int kFours = kBits / 4 * 4;
  JGG_UNROLL
  for (int i = 0; i < kFours; i += 4) StoreWords<4>(tile + 512 * i + 16 * thread, words + i);
  if constexpr (kBits & 2) StoreWords<2>(tile + 512 * kFours + 8 * thread, words + kFours);
  if constexpr (kBits & 1) {
    StoreWords<1>(tile + 512 * (kBits - 1) + 4 * thread, words + kBits - 1);
  }
}

// Some of the bits of a pair's codes: those from `bit` on are in bits `place` and up of the halves
// of a word.
struct CodeField {
  int bit, bits, word, place;
};

template <int kBits>
JGG_HOST_DEVICE constexpr int CodeFields(int pair) {
  if (kBits == 3 || kBits == 5) return pair == 15 ? kBits : 1;
  if (kBits == 6) return pair % 8 >= 6 ? 2 : 1;
  return kBits == 8 ? 2 : 1;
}

template <int kBits>
JGG_HOST_DEVICE constexpr CodeField CodeFieldOf(int pair, int i) {
  constexpr int kEach = 16 / kBits;
  if ((kBits == 3 || kBits == 5) && pair == 15) return {i, 1, i, 15};
  if (kBits == 6) {
    const int word = 3 * (pair / 8), number = pair % 8;
    if (number < 6) return {0, 6, word + number / 2, 6 * (number % 2)};
    if (i == 0) return {0, 4, number == 6 ? word : word + 2, 12};
    return {4, 2, word + 1, number == 6 ? 14 : 12};
  }
  if (kBits == 8) {
    if (i == 0) return {0, 7, pair / 2, 7 * (pair % 2)};
    return {7, 1, pair / 2, 14 + pair % 2};
  }
  return {0, kBits, pair / kEach, kBits * (pair % kEach)};
}

// Put a thread's pairs in order, of which each has its codes in the lower bits of its halves.
template <int kBits>
JGG_HOST_DEVICE void PackPairs(const uint32_t (&pairs)[16], uint32_t (&words)[kBits]) {
  JGG_UNROLL
  for (int i = 0; i < kBits; ++i) words[i] = 0;
  JGG_UNROLL
  for (int pair = 0; pair < 16; ++pair) {
    JGG_UNROLL
    for (int i = 0; i < CodeFields<kBits>(pair); ++i) {
      const CodeField field = CodeFieldOf<kBits>(pair, i);
      const uint32_t mask = ((1u << field.bits) - 1) * 0x10001;
      const bool whole = field.bits == kBits;
      const uint32_t bits = whole ? pairs[pair] : pairs[pair] >> field.bit & mask;
      words[field.word] += bits << field.place;  // an OR, in one instruction with the shift
    }
  }
}

// Pair number `pair` of 16 pairs of codes, which ends before bit kEnd. Its first code is in words'
// lower halves, its second in the upper ones.
template <int kBits, int kEnd>
JGG_HOST_DEVICE CodePair PackedPairOf(const uint32_t (&words)[kBits], int pair, uint32_t more) {
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x10001;
  constexpr int kEach = 16 / kBits;  // whole pairs of a word
  if constexpr (kBits == 6) {
    // Every 8 pairs are 3 words. Each word has two of them; the two others are in the bits that are
    // left: four of a word, and two of the middle one.
    const int first = 3 * (pair / 8), number = pair % 8;
    if (number < 6) {
      const uint32_t word = words[first + number / 2] >> (number % 2 == 0 ? 0 : 6);
      return {MaskOr(word, kMask, more), 0};
    }
    const uint32_t low = words[number == 6 ? first : first + 2] >> 12;
    const uint32_t high = words[first + 1] >> (number == 6 ? 10 : 8);
    return {MaskOr(high, 0x00300030, MaskOr(low, 0x000f000f, more)), 0};
  } else {
    constexpr int kTogether = kEnd / kBits * kBits;  // bits that share a shift
    const int word = pair / kEach, at = kBits * (pair % kEach);
    const auto code = [&](int shift) -> CodePair {
      const int place = at - shift;
      return {MaskOr(words[word] >> shift, kMask << place, more), place};
    };
    if constexpr (kBits == 2 || kBits == 4) {
      return code(at / kTogether * kTogether);
    } else {
      static_assert(kBits == 3 || kBits == 5);
      constexpr int kFirst = kBits == 3 ? 3 : 2;  // where the last pair is gathered, of bits 15
      if (pair < 15) {
        if (pair % kEach < kEach - 1) return code(at / kTogether * kTogether);
        const int shift = 15 - kFirst - word;  // of the word's bit 15, for the last pair
        return code(shift < at ? shift : at);
      }
      JGG_UNROLL
      for (int i = 0; i < kBits; ++i) {
        more = MaskOr(words[i] >> (15 - kFirst - i), 0x10001u << (kFirst + i), more);
      }
      return {more, kFirst};
    }
  }
}

// As whole numbers.
template <int kBits>
JGG_HOST_DEVICE uint32_t PackedCodePair(const uint32_t (&words)[kBits], int pair) {
  return NumbersBeside128(PackedPairOf<kBits, kEndBeside128>(words, pair, k128Twice));
}

// ... in float16.
template <int kBits>
JGG_HOST_DEVICE uint32_t PackedHalfPair(const uint32_t (&words)[kBits], int pair) {
  if constexpr (kBits == 8) {
    const uint32_t word = words[pair / 2];
    const uint32_t low = MaskOr(pair % 2 == 0 ? word : word >> 7, 0x007f007f, k1024Twice);
    return NumbersBeside1024({MaskOr(pair % 2 == 0 ? word >> 7 : word >> 8, 0x00800080, low), 0});
  } else {
    return NumbersBeside1024(PackedPairOf<kBits, kEndBeside1024>(words, pair, k1024Twice));
  }
}

// Codes of 2 bits alone, at 9 or 7 of float16.
JGG_HOST_DEVICE CodePair PackedHalfAlone(const uint32_t (&words)[2], int pair) {
  const int at = 2 * (pair % 8), place = at % 4 == 2 ? 9 : 7;
  const uint32_t word = words[pair / 8];
  return {(at > place ? word >> (at - place) : word << (place - at)) & (0x30003u << place), place};
}

// Two pairs in a word: in bits 0 to 6 and 14, and 7 to 13 and 15. A code without its highest bit is
// 128 too large as above, which is right if that bit is set.
template <>
JGG_HOST_DEVICE uint32_t PackedCodePair<8>(const uint32_t (&words)[8], int pair) {
  constexpr uint32_t k1 = 0x3f803f80, k64 = 0x42804280, kMinus = 0x80008000;
  const uint32_t word = words[pair / 2];
  if (pair % 2 == 0) {
    const uint32_t low = MaskOr(word, 0x007f007f, k128Twice);
    return MultiplyAdd2<DType::kBF16>(~word & 0x40004000, k64 | kMinus, low);  // 2 or 0, times -64
  }
  const uint32_t low = MaskOr(word >> 7, 0x007f007f, k128Twice);
  const uint32_t sign = MaskOr(word, kMinus, k64);  // -64 where the bit is set, else 64
  const uint32_t change = MultiplyAdd2<DType::kBF16>(sign, k1 | kMinus, k64 | kMinus);
  return MultiplyAdd2<DType::kBF16>(low, k1, change);
}

}  // namespace jgg::device

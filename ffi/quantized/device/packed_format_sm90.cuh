// Decoders of layout "sm90" (quantized/gemm_sm90.h): PackedCodes, of each format in a file of
// formats/. Plain C++ on the host, too, as far as a kernel there needs it.
#pragma once

#include <cstdint>

#include "quantized/device/packed_codes.cuh"
#include "quantized/device/registers_sm90.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

// e2m1: the sign and the three other bits of a code where bfloat16 has its sign and the last bit of
// its exponent and the first two of its mantissa (bits 15 and 8-6): 2^-126 times the value,
// subnormals included. How four codes share 16 bits was searched for: no other way takes fewer
// operations than these nine. One after another, sign and others are in bits 15 8-6, 9 2-0, 3 12-10
// (of the other half) and 13 14 5-4.
__device__ inline void E2M1Pairs(uint32_t codes, uint32_t* pairs) {
  constexpr uint32_t kBoth = 0x81c081c0;
  pairs[0] = codes & kBoth;
  pairs[1] = codes << 6 & kBoth;
  pairs[2] = FunnelLeft(codes, codes, 12) & kBoth;
  pairs[3] = (codes << 2 & 0x80c080c0) | (codes >> 6 & 0x01000100);
}

// e2m1 for float16: the same bits where it has its sign, the last two bits of its exponent and the
// first of its mantissa (bits 15 and 11-9): 2^-14 times the value. Products move the sign and the
// other bits by as much as each needs: by the sum of two powers of two, or by 8 all but the sign.
__device__ inline void E2M1HalfPairs(uint32_t codes, uint32_t* pairs) {
  constexpr uint32_t kBoth = 0x81c081c0, kRest = 0x01c001c0, kPlaces = 0x8e008e00;
  const uint32_t first = codes & kBoth, third = FunnelLeft(codes, codes, 12) & kBoth;
  pairs[0] = (first & kRest) * 7 + first;
  pairs[1] = (codes & 0x02070207) * ((1 << 6) + (1 << 9)) & kPlaces;
  pairs[2] = (third & kRest) * 7 + third;
  pairs[3] =
      ((codes & 0x20302030) * ((1 << 2) + (1 << 5)) & 0x86008600) | (codes >> 3 & 0x08000800);
}
constexpr uint32_t kMinusZeros = 0x80008000;  // keeps the sign of a product that is 0

// e4m3: the sign and the other bits where bfloat16 has its sign, the last four bits of its exponent
// and the first three of its mantissa (bits 15 and 10-4): 2^-120 times the value, subnormals
// included. Four pairs share two words: the third has its first five bits in the first word (bits
// 3, of the other half, and 14-11) and its last three in the second (2-0), the fourth likewise.
__device__ inline void E4M3Pairs(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  constexpr uint32_t kAll = 0x87f087f0, kHigh = 0x87808780, kLast = 0x00700070;
  const auto rotate = [](uint32_t word, int left) { return FunnelLeft(word, word, left); };
  pairs[0] = first & kAll;
  pairs[1] = second & kAll;
  pairs[2] = MaskOr(rotate(second, 4), kLast, rotate(first, 28) & kHigh);
  pairs[3] = MaskOr(rotate(first, 4), kLast, rotate(second, 28) & kHigh);
}

// A pair of bfloat16 as float16, rounded; larger ones are infinite.
__device__ inline uint32_t ToHalves(uint32_t pair) {
  return Round2<DType::kF16>(AsFloat(pair << 16), AsFloat(pair & 0xffff0000));
}

// Of which dtype scales are that multiply sums: of any, as the kernel's argument says, or one of
// these.
enum class PackedFloats { kAny, k16Bits, k32Bits };

// A format's decoder: from a thread's codes of a tile and the scales of its two rows, which it
// loads, to what WGMMA takes.
template <Mode kMode, int kBits>
struct PackedCodes;

// The members that most of these decoders share.
template <Mode kMode, int kBits>
struct PackedCodesBase {
  using Format = FormatTraits<kMode, kBits>;
  static constexpr PackedScales kMostScales = Format::PackedScalesOf(Format::kLeastGroupSm90);
  // Words of a row's scales, at most. Bytes of a tile's: with one word to a row, or half a word.
  static constexpr int kMostScaleWords = kMostScaleWordsOf<Format>;
  static constexpr int kTileScales = kMostScales.words < 64 ? 128 : 256;
  // Bytes of the scales of 128 k, at most.
  static constexpr int kStageScales = 4 * kMostScales.words * 128 / kMostScales.k;
  static constexpr float kFactor = 1, kSmallFactor = 1;  // of sums, and where scales are kSmall
  static constexpr float kHalfFactor = 1;                // ... and where x is float16
  static constexpr bool kHasSmall = false, kHasSmallHalves = false;  // and where x is float16
  static constexpr bool kHasBiases = Format::kScale == ScaleType::kScaleAndBias;
  // Few rows: from how many blocks per SM on registers are so few that loads should be late.
  static constexpr int kLoadsLateFrom = 2;

  // Bytes of a tile's scales, or of half of two tiles' that share them.
  __device__ static int TileScales(const PackedCodesSm90& packed) {
    return kMostScaleWords == 1 ? kStageScales / 2 : packed.tile_scales;
  }

  // Bits of two rows' scales that are set where they are not small.
  __device__ static uint32_t NotSmallBits(const char* scales) {
    const uint2 two = *reinterpret_cast<const uint2*>(scales);
    return (NotSmall(two.x) | NotSmall(two.y)) & kHighest;
  }

  // The same of float16.
  __device__ static uint32_t NotSmallHalfBits(const char*) { return 0; }

  // The same as Decode in float16: values that bfloat16 holds.
  template <bool kFewRows, ScaleRange, int kWords>
  __device__ static void DecodeHalf(const uint32_t (&codes)[kBits], int step,
                                    const uint32_t (&scales)[kWords][2], uint32_t* a) {
    PackedCodes<kMode, kBits>::template Decode<kFewRows, ScaleRange::kAny>(codes, step, scales, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ToHalves(a[i]);
  }

  // The scales of two rows as Decode takes them. A tile of them has `tile_scales` bytes.
  template <bool kFewRows, ScaleRange>
  __device__ static void LoadScales(const char* scales, int /*tile_scales*/,
                                    uint32_t (&words)[kMostScaleWords][2]) {
    LoadWords<2>(scales, words[0]);
  }

  // ... as DecodeHalf does.
  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadHalfScales(const char* scales, int tile_scales,
                                        uint32_t (&words)[kMostScaleWords][2]) {
    PackedCodes<kMode, kBits>::template LoadScales<kFewRows, kRange>(scales, tile_scales, words);
  }
};

}  // namespace jgg::device

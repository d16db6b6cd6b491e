// Decoders of lines of codes as they are stored, layout "linear", to pairs of bfloat16, or float16:
// LineCodes, of each format in a file of formats/. few_rows_weights.cuh and linear_weights_sm90.cuh
// use them.
#pragma once

#include <cstdint>

#include "quantized/device/registers_sm90.cuh"
#include "quantized/device/streams.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

// The scales of 32 codes of a line, and what belongs to them: bfloat16, the same in both halves
// (groups of 16: those of codes 0-15 and 16-31).
struct LineScales {
  uint32_t scale;
  uint32_t bias;  // mxfp4, mxfp8, where it Fits: the scale times what E2M1Of, E4M3Of leave out
};

// Affine: those of codes 0-15 and 16-31.
struct FloatScales {
  float scale[2], bias[2];
};

// Whether one of these codes e4m3 is NaN.
template <int kWords>
__device__ bool HasNaN(const uint32_t (&codes)[kWords]) {
  uint32_t nan = 0;
#pragma unroll
  for (uint32_t word : codes) nan |= (word & 0x7f7f7f7f) + 0x01010101;
  return (nan & 0x80808080) != 0;
}

// A format's decoder. It has
//
//   Scales   of block `b` of 32 codes, from the bits of all blocks' scales and biases. If one group
//            has all blocks, its scale and bias are the lower halves.
//   Fits     whether values are those of `dequantize` by a fused multiply-add: see FitsPairs
//   Check    changes scales where codes are NaN
//   Pair     codes p and 16 + p of streams, as the product takes them
//   FloatPair  the same of float32 scales and biases, where there are biases
//
// and, where WGMMA multiplies,
//
//   NotSmall, Word   of what was loaded for 32 codes: bits, of which those of kNotSmall are set
//   where
//                    it is not small; a word that stands for it
//   OfHalf           that word for half of the codes
//   PairOf           pair p of 16, with that word
//   HalfWord, HalfPairOf, NotSmallHalves   the same in float16, beside float16 scales and biases,
//                    where there are floats; kHalfUnit is kUnit there
template <Mode kMode, int kBits>
struct LineCodes;

template <Mode kMode, int kBits>
struct LineCodesBase {
  using Format = FormatTraits<kMode, kBits>;
  static constexpr bool kHasBiases = Format::kScale == ScaleType::kScaleAndBias;
  // Bytes of a scale, and of those of 32 codes where groups are as small as they may be.
  static constexpr bool kInBlocks = Format::kScale == ScaleType::kFloat32;
  static constexpr int kScaleSize = kInBlocks ? 4 : kHasBiases ? 2 : 1;
  static constexpr int kBlockScales = kScaleSize * Format::kScalesOf32;
  static constexpr float kUnit = 1.0f, kHalfUnit = 1.0f;  // sums are of values divided by this
  // The codes of a pair of PairOf are so many apart, where scales do not multiply sums.
  static constexpr int kApart = 16 % kBits ? 16 : 16 / kBits;
  // WGMMA: whether scales may multiply sums of 128 k.
  static constexpr bool kScalesSums = false;
  // WGMMA: whether scales may be kSmall, and what sums are of then.
  static constexpr bool kHasSmall = false, kHasSmallHalves = false;
  static constexpr float kSmallFactor = 1.0f;

  __device__ static void Check(const uint32_t (&)[kBits], LineScales&) {}

  // What WGMMA loads for 32 codes: scale and bias, or the bytes of their scales.
  using Loaded = uint32_t[kHasBiases ? 2 : 1];

  static constexpr uint32_t kNotSmall = kHasBiases ? kHighest : kHighestOfBytes;
  __device__ static uint32_t NotSmall(Loaded& loaded) { return loaded[0]; }
  __device__ static uint32_t NotSmallHalves(const Loaded&) { return 0; }

  template <ScaleRange kRange>
  __device__ static uint32_t HalfWord(const Loaded& loaded) {
    return LineCodes<kMode, kBits>::template Word<kRange>(loaded);
  }

  // kHalf: of HalfWord's.
  template <bool kHalf, int kCodes>
  __device__ static uint32_t OfHalf(uint32_t word, int, const uint32_t (&)[kCodes]) {
    return word;
  }

 protected:
  // In bfloat16, twice.
  static constexpr uint32_t kTwice = 0x800080, kOne = 0x3f803f80;
  static constexpr uint32_t kTwo120 = kOne + 120 * kTwice, kTwo126 = kOne + 126 * kTwice;

  __device__ static uint32_t Times(uint32_t a, uint32_t b) {
    return MultiplyAdd2<DType::kBF16>(a, b, 0x80008000);
  }
  __device__ static uint32_t TimesHalves(uint32_t a, uint32_t b) {
    return MultiplyAdd2<DType::kF16>(a, b, 0x80008000);
  }
};

}  // namespace jgg::device

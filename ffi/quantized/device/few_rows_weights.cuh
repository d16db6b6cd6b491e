// Codes of a line to pairs of bfloat16, in every linear format: the weights of few_rows_sm80.cuh.
#pragma once

#include <cstdint>

#include "quantized/device/streams.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

// The scales of 32 codes of a line, and what belongs to them: bfloat16, the same in both halves
// (nvfp4: those of codes 0-15 and 16-31).
struct LineScales {
  uint32_t scale;
  uint32_t bias;  // mxfp4, mxfp8, where it Fits: the scale times what E2M1Of, E4M3Of leave out
};

template <Mode kMode_, int kBits_, int kCopy_ = 16>
struct FewRowsWeights {
  using Format = FormatTraits<kMode_, kBits_>;
  static constexpr int kBits = kBits_;
  static constexpr bool kAffine = Format::kScale == ScaleType::kScaleAndBias;
  static constexpr bool kE4M3Codes = Format::kCode == CodeType::kE4M3;
  static constexpr bool kE4M3Scales = Format::kScale == ScaleType::kE4M3;
  static_assert(kAffine || (kE4M3Scales && Format::kScalesOf32 == 2) ||
                Format::kScale == ScaleType::kE8M0);
  // Blocks of 32 codes that a thread takes in a step; bytes of a copy; bytes that are placed, and
  // read, together, and how many times a thread reads so many.
  static constexpr int kBlocks = kBits == 8 ? 1 : 2;
  static constexpr int kCopy = kCopy_;
  static constexpr int kPiece = kBits % 2 == 0 ? 16 : 8;
  static constexpr int kPieces = 4 * kBits * kBlocks / kPiece;
  // Sums are of values divided by this. An e4m3 scale times 2^126, as which it would be the only
  // factor of E2M1Of, exceeds bfloat16; times 2^117 it fits.
  static constexpr float kUnit = kE4M3Scales ? 0x1p9f : 1.0f;
  // Bytes of their scales (biases) where groups are as small as they may be.
  static constexpr int kScaleBytes = (kAffine ? 2 : Format::kScalesOf32) * kBlocks;

  // The scales of block `b`, from the bits of all blocks' scales and biases. If one group has all
  // blocks, its scale and bias are the lower halves.
  __device__ static LineScales Scales(uint32_t scale, uint32_t bias, int b, bool one_group) {
    if constexpr (kAffine) {
      const uint32_t both = b == 0 || one_group ? 0x1010 : 0x3232;
      return {Permute(scale, 0, both), Permute(bias, 0, both)};
    } else if constexpr (kE4M3Scales) {
      const uint32_t magnitudes = Permute(scale, 0, b == 0 ? 0x4140 : 0x4342) & 0x007f007f;
      // Added to what the bits stand for: -0, or NaN where all are set.
      const uint32_t zeros = ((magnitudes + 0x10001) >> 1 & 0x400040) * 511 + 0x80008000;
      scale = MultiplyAdd2<DType::kBF16>(magnitudes << 4, kTwo120, zeros);
      return {Times(scale, kTwo126 - 9 * kTwice), 0};  // 9: kUnit
    } else {
      scale = scale >> 8 * b & 0xff;
      return {Bf16OfE8M0(scale) * 0x10001, scale * 0x800080 + kLeftOut - kOne};
    }
  }

  // Whether values are those of `dequantize` by a fused multiply-add: see FitsPairs. NumbersOf are
  // whole numbers of 8 bits at most, which bfloat16 holds, so 8 bits may, too.
  __device__ static bool Fits(const LineScales& line) {
    if constexpr (kE4M3Scales) {
      return true;
    } else if constexpr (kAffine) {
      constexpr int kMostBelow = 14 - kBits, kMostAbove = 14;
      const float scale = AsFloat(line.scale << 16), bias = AsFloat(line.bias << 16);
      const uint32_t above = AsBits(fabsf(bias)) - AsBits(fabsf(scale)) + (kMostBelow << 23);
      return fabsf(scale) < 0x1p105f &&
             (above <= static_cast<uint32_t>(kMostBelow + kMostAbove) << 23 || bias == 0.0f);
    } else {  // line.bias is finite
      return line.scale <= (kE4M3Codes ? 0x43004300 : 0x40004000);
    }
  }

  // A NaN among e4m3 codes makes its column of the product one, so its scale may be.
  __device__ static void Check(const uint32_t (&words)[kBits], LineScales& line) {
    if constexpr (kE4M3Codes) {
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < kBits; ++i) nan |= (words[i] & 0x7f7f7f7f) + 0x01010101;
      if (nan & 0x80808080) line.scale = 0x7fc07fc0;
    }
  }

  template <bool kFits>
  __device__ static uint32_t Pair(const uint32_t (&streams)[kBits], int p, const LineScales& line) {
    if constexpr (kAffine) {
      const uint32_t numbers = NumbersOf<kBits>(streams, p);
      if constexpr (kFits) return MultiplyAdd2<DType::kBF16>(numbers, line.scale, line.bias);
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[i] = Add(Multiply(Half<DType::kBF16>(numbers, i), AsFloat(line.scale << 16)),
                        AsFloat(line.bias << 16));
      }
      return Round2<DType::kBF16>(values[0], values[1]);
    } else {
      const uint32_t small = kE4M3Codes ? E4M3Of(streams, p) : E2M1Of(streams, p);
      if constexpr (kE4M3Scales) return Times(small, line.scale);
      return kFits ? Times(small, line.bias) : Times(Times(small, kLeftOut), line.scale);
    }
  }

 private:
  // In bfloat16, twice.
  static constexpr uint32_t kTwice = 0x800080, kOne = 0x3f803f80;
  static constexpr uint32_t kTwo120 = kOne + 120 * kTwice, kTwo126 = kOne + 126 * kTwice;
  static constexpr uint32_t kLeftOut = kE4M3Codes ? kTwo120 : kTwo126;  // by E4M3Of, E2M1Of

  __device__ static uint32_t Times(uint32_t a, uint32_t b) {
    return MultiplyAdd2<DType::kBF16>(a, b, 0x80008000);
  }
};

}  // namespace jgg::device

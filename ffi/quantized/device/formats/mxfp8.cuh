// How kernels decode mode "mxfp8" in registers; quantized/formats/mxfp8.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/formats/mx.cuh"
#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// Scales are bfloat16, one for every 32 k. Code 127 would be 480: of a group that has it the scale
// is NaN.
template <>
struct PackedCodes<Mode::kMxfp8, 8> : PackedCodesBase<Mode::kMxfp8, 8> {
  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[8], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Multiply2(Multiply2(pairs[i], k2To120), Twice(scales[0][i % 2], step / 2));
    }
  }
};

// A NaN among codes makes its column of the product one, so its scale may be.
template <>
struct LineCodes<Mode::kMxfp8, 8> : MxLineCodes<Mode::kMxfp8, 8, 120> {
  __device__ static void Check(const uint32_t (&words)[8], LineScales& line) {
    if (HasNaN(words)) line.scale = kNaN;
  }

  template <bool kFits>
  __device__ static uint32_t Pair(const uint32_t (&streams)[8], int p, const LineScales& line) {
    return Scaled<kFits>(E4M3Of(streams, p), line);
  }

  template <ScaleRange>
  __device__ static uint32_t Word(const Loaded& loaded) {
    return Scales(loaded[0], 0, 0, true).scale;
  }

  template <bool kHalf, int kCodes>
  __device__ static uint32_t OfHalf(uint32_t word, int, const uint32_t (&codes)[kCodes]) {
    return !kHalf && HasNaN(codes) ? kNaN : word;
  }

  template <ScaleRange>
  __device__ static uint32_t PairOf(const uint32_t* codes, int p, uint32_t word) {
    return Multiply2(Multiply2(E4M3Of(codes, p), k2To120), word);
  }

  template <ScaleRange>
  __device__ static uint32_t HalfWord(const Loaded& loaded) {
    return HalfFactors<0>(loaded[0]);
  }

  template <ScaleRange>
  __device__ static uint32_t HalfPairOf(const uint32_t* codes, int p, uint32_t word) {
    return TimesFactors(HalvesOfE4M3(Permute(codes[p / 2], 0, 0x3120), p % 2), word);
  }
};

}  // namespace jgg::device

// Mode "affine" in registers: formats/affine.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// A word of scales is scale and bias, bfloat16, of 64 or 128 k, or of 32 where there are two: then
// they are not small.
template <int kBits>
struct PackedCodes<Mode::kAffine, kBits> : PackedCodesBase<Mode::kAffine, kBits> {
  static constexpr bool kHasSmall = kBits < 8;
  static constexpr float kSmallFactor = 0x1p8f;
  static constexpr bool kAlwaysWarps = kBits == 8;

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadScales(const char* scales, int tile_scales, uint32_t (&words)[2][2]) {
    LoadWords<2>(scales, words[0]);
    if constexpr (kRange == ScaleRange::kSmall) {
      words[1][0] = words[0][0];
    } else {  // the first again where there is no second
      LoadWords<2>(scales + max(tile_scales - PackedCodes::kTileScales, 0), words[1]);
    }
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void Decode(const uint32_t (&codes)[kBits], int step,
                                const uint32_t (&scales)[2][2], uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = 4 * step + i;
      if constexpr (kRange == ScaleRange::kSmall) {
        const CodePair alone = PackedPairOf<kBits, kEndAlone>(codes, pair, 0);
        const uint32_t both = SmallScales(scales[0][i % 2], alone.place);
        a[i] = MultiplyAdd2<DType::kBF16>(alone.bits, Twice(both, 0), Twice(both, 1));
      } else {
        const uint32_t both = scales[step / 2][i % 2];
        a[i] =
            MultiplyAdd2<DType::kBF16>(PackedCodePair(codes, pair), Twice(both, 0), Twice(both, 1));
      }
    }
  }
};

}  // namespace jgg::device

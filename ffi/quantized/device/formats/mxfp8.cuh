// Mode "mxfp8" in registers: formats/mxfp8.h says what it is.
#pragma once

#include <cstdint>

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

}  // namespace jgg::device

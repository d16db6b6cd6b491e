// Mode "nvfp4" in registers: formats/nvfp4.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// Scales are e4m3 with one more bit of exponent, so that all are normal: (exponent + 10) * 8 +
// mantissa, and 255 for NaN; where one is 0, so are codes. Values are 2^-19 of what they stand for.
template <>
struct PackedCodes<Mode::kNvfp4, 4> : PackedCodesBase<Mode::kNvfp4, 4> {
  static constexpr float kFactor = 0x1p19f;
  static constexpr int kLoadsLateFrom = 3;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[4], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E2M1Pairs(codes[step], pairs);
    const uint32_t s = Scale<kFewRows>(scales[0][0], step);
    const uint32_t s8 = Scale<kFewRows>(scales[0][1], step);
    a[0] = Multiply2(pairs[0], s);
    a[1] = Multiply2(pairs[1], s8);
    a[2] = Multiply2(pairs[2], s);
    a[3] = Multiply2(pairs[3], s8);
  }

 private:
  // 2^107 times the scale, twice: made for two steps at a time.
  template <bool kFewRows>
  __device__ static uint32_t Scale(uint32_t bytes, int step) {
    const uint32_t two = Permute(bytes, 0, step < 2 ? 0x4140 : 0x4342);
    return Twice(two * PowerOfTwo<kFewRows>(4) + 0x70007000, step % 2);
  }
};

}  // namespace jgg::device

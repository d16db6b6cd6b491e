// How kernels decode mode "fp8" in registers; quantized/formats/fp8.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// A scale is the sum of two bfloat16 numbers, the upper half of a word the smaller one, for every
// 128 k. They are 2^88 times what they stand for, so that a code is brought back by the product
// that scales it, and values are 2^-32 of what they stand for. Code 127 as for mxfp8.
template <>
struct PackedCodes<Mode::kFp8, 8> : PackedCodesBase<Mode::kFp8, 8> {
  static constexpr float kFactor = 0x1p32f;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[8], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = scales[0][i % 2], rest = Multiply2(pairs[i], Twice(both, 1));
      a[i] = MultiplyAdd2<DType::kBF16>(pairs[i], Twice(both, 0), rest);
    }
  }
};

}  // namespace jgg::device

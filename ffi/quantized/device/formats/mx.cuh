// Decoding that mxfp4.cuh and mxfp8.cuh share.
#pragma once

#include <cstdint>

#include "quantized/device/line_format.cuh"

namespace jgg::device {

// `Of` a pair of codes leaves out 2^kExponent.
template <Mode kMode, int kBits, int kExponent>
struct MxLineCodes : LineCodesBase<kMode, kBits> {
  using Base = LineCodesBase<kMode, kBits>;
  static constexpr uint32_t kLeftOut = Base::kOne + kExponent * Base::kTwice;

  __device__ static LineScales Scales(uint32_t scale, uint32_t, int b, bool) {
    scale = scale >> 8 * b & 0xff;
    return {Bf16OfE8M0(scale) * 0x10001, scale * Base::kTwice + kLeftOut - Base::kOne};
  }

  // Whether line.bias is finite.
  __device__ static bool Fits(const LineScales& line) {
    constexpr uint32_t kMost = (254 - kExponent) * Base::kTwice;
    return line.scale <= kMost;
  }

 protected:
  template <bool kFits>
  __device__ static uint32_t Scaled(uint32_t small, const LineScales& line) {
    return kFits ? Base::Times(small, line.bias)
                 : Base::Times(Base::Times(small, kLeftOut), line.scale);
  }
};

}  // namespace jgg::device

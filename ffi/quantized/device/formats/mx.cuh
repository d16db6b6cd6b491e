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

  // Two float16 whose product is the scale times what codes leave out in float16, 2^kHalfExponent.
  // A code is multiplied by the first, exactly unless it becomes infinite, and by the second, which
  // rounds it as the value itself is rounded.
  template <int kHalfExponent>
  __device__ static uint32_t HalfFactors(uint32_t scale) {
    const int power = static_cast<int>(scale) - 127 + kHalfExponent;
    const int second = min(max(power, -24), 15), first = min(max(power - second, -14), 15);
    const auto two_to = [](int exponent) { return AsFloat((exponent + 127) << 23); };
    const uint32_t factors = Round2<DType::kF16>(two_to(first), two_to(second));
    // The least code of e2m1, 2^-15 so far, is infinite only by larger factors.
    constexpr uint32_t kMost = 0x7a007a00;
    if (kHalfExponent > 0 && power > 30) return scale == 255 ? kNaN : kMost;
    return scale == 255 ? kNaN : factors;
  }

 protected:
  static constexpr uint32_t kNaN = 0x7fc07fc0;  // in float16, too

  __device__ static uint32_t TimesFactors(uint32_t pair, uint32_t word) {
    return Base::TimesHalves(Base::TimesHalves(pair, Twice(word, 0)), Twice(word, 1));
  }

  template <bool kFits>
  __device__ static uint32_t Scaled(uint32_t small, const LineScales& line) {
    return kFits ? Base::Times(small, line.bias)
                 : Base::Times(Base::Times(small, kLeftOut), line.scale);
  }
};

}  // namespace jgg::device

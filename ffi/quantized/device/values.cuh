// Codes to values exactly as jax_groupgemm.dequantize gives them, signs of zeros and patterns of
// NaN included: by decode.cuh where that agrees, else one by one. Also compiled for the host, where
// tests/quantized/test_dequantize_host.py compares it with that definition.
#pragma once

#include "quantized/device/decode.cuh"
#include "quantized/device/encode.cuh"

namespace jgg::device {

// The scales of a lane's 32 codes, and what belongs to them.
struct UnitScales {
  uint32_t first, second;  // bits of scale and bias; of two scales (nvfp4); of the scale
  float low, high;         // global scales of the first 16 and the last
  uint32_t third, fourth;  // affine: bits of scale and bias of the last 16

  JGG_HOST_DEVICE ScaleBits Bits(bool halves) const {
    return {first, second, third, fourth, halves};
  }
};

template <DType kTo_, Mode kMode_, int kBits_, bool kGlobal_>
struct ValueDecoder {
  static constexpr DType kTo = kTo_;
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
  static constexpr bool kGlobal = kGlobal_;
  using Format = FormatTraits<kMode, kBits>;

  // Stores eight values at a time, store(i, Eight<kTo>). False, for all lanes of a warp alike,
  // where they have to be decoded one by one; what has been stored is then void. halves: affine
  // groups are of 16.
  template <typename Store>
  static JGG_HOST_DEVICE bool Decode(DType scale_dtype, const uint32_t (&codes)[kBits],
                                     const UnitScales& scales, bool halves, Store store) {
    if (AnyLane(!IsUsual(scale_dtype, scales, halves))) return false;
    constexpr int kOnly = kWayOf<kMode, kBits>;
    const Coding coding{kMode, kBits, scale_dtype};
    const auto load = [&](auto& words) {
      JGG_UNROLL
      for (int i = 0; i < kBits; ++i) words[i] = codes[i];
    };
    if constexpr (!kGlobal) {
      return Decode32<kTo, kOnly>(MakeScales<kTo>(coding, scales.Bits(halves)), load, store);
    } else {
      // In bfloat16 a product of element and scale is exact.
      const auto times = [&](int i, const Eight<DType::kBF16>& eight) {
        float values[8];
        JGG_UNROLL
        for (int j = 0; j < 8; ++j) {
          const float value = Half<DType::kBF16>(eight.words[j / 2], j % 2);
          values[j] = Multiply(value, i < 2 ? scales.low : scales.high);
        }
        store(i, Round8<kTo>(values));
      };
      return Decode32<DType::kBF16, kOnly>(MakeScales<DType::kBF16>(coding, scales.Bits(false)),
                                           load, times);
    }
  }

  // The bits of one value.
  static JGG_HOST_DEVICE uint32_t Value(DType scale_dtype, uint32_t code, const UnitScales& scales,
                                        bool upper) {
    float value;
    if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
      // The definition's two products, each exact, decide on the sign of zero.
      const float scale = ScaleOfBits(upper ? scales.third : scales.first, scale_dtype);
      const float bias = ScaleOfBits(upper ? scales.fourth : scales.second, scale_dtype);
      const bool finite = fabsf(scale) < AsFloat(kInfinity);
      const float high = finite ? AsFloat(AsBits(scale) & 0xffffff00) : scale;
      const float low = finite ? Add(scale, -high) : 0.0f;
      const float q = static_cast<float>(code);
      value = Add(Add(Multiply(q, high), Multiply(q, low)), bias);
    } else {
      const uint32_t scale = Format::kScalesOf32 == 2 && upper ? scales.second : scales.first;
      value = DecodeOne({kMode, kBits, scale_dtype}, code, scale, 0);
      if (kGlobal) value = Multiply(value, upper ? scales.high : scales.low);
    }
    return Narrow<kTo>(value);
  }

 private:
  // Neither NaN, which has many patterns, nor a bias of - 0, whose sums have any sign.
  static JGG_HOST_DEVICE bool IsUsual(DType scale_dtype, const UnitScales& scales, bool halves) {
    if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
      const auto usual = [&](uint32_t bits) {
        const float bias = ScaleOfBits(bits, scale_dtype);
        return fabsf(bias) < AsFloat(kInfinity) && AsBits(bias) != kSign;
      };
      return usual(scales.second) && (!halves || usual(scales.fourth));
    } else if constexpr (Format::kScale == ScaleType::kE8M0) {
      return scales.first != 255;
    } else {
      static_assert(Format::kScale == ScaleType::kE4M3 && Format::kScalesOf32 == 2);
      const float largest = fmaxf(fabsf(scales.low), fabsf(scales.high));
      const bool finite = !kGlobal || (scales.low == scales.low && scales.high == scales.high &&
                                       largest < AsFloat(kInfinity));
      return finite && (scales.first & 0x7f) != 0x7f && (scales.second & 0x7f) != 0x7f;
    }
  }
};

// Code i of a stream.
template <int kBits>
JGG_HOST_DEVICE uint32_t CodeAt(const uint32_t* words, int i) {
  const int bit = i * kBits;
  const uint32_t next = bit % 32 + kBits > 32 ? words[bit / 32 + 1] : 0;
  return FunnelRight(words[bit / 32], next, bit % 32) & ((1u << kBits) - 1);
}

// function(decoder) for the decoder of a format: its type is what counts.
template <DType kTo, typename Function>
auto DispatchDecoder(const Coding& coding, bool global, Function&& function) {
  return LinearFormats::Dispatch(coding.mode, coding.bits, [&](auto format) {
    using Format = decltype(format);
    constexpr Mode kMode = Format::kMode;
    if constexpr (Format::kTakesGlobalScale) {
      if (global) return function(ValueDecoder<kTo, kMode, Format::kBits, true>{});
    }
    return function(ValueDecoder<kTo, kMode, Format::kBits, false>{});
  });
}

}  // namespace jgg::device

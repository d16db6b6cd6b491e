// How kernels decode mode "mxfp4" in registers; quantized/formats/mxfp4.h says what it is.
#pragma once

#include <cstdint>

#include "quantized/device/formats/mx.cuh"
#include "quantized/device/packed_format_sm90.cuh"

namespace jgg::device {

// The scales of both rows are one word of e8m0: a row's first 32 k, and the 32 after.
template <>
struct PackedCodes<Mode::kMxfp4, 4> : PackedCodesBase<Mode::kMxfp4, 4> {
  static constexpr bool kHasSmall = true, kHasSmallHalves = true;

  __device__ static uint32_t NotSmallBits(const char* scales) {
    return *reinterpret_cast<const uint32_t*>(scales) & kHighestOfBytes;
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadScales(const char* scales, int, uint32_t (&words)[1][2]) {
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(scales);
#pragma unroll
    for (int r = 0; r < 2; ++r) words[0][r] = Scale<kFewRows, kRange>(bytes, r);
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void Decode(const uint32_t (&codes)[4], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    E2M1Pairs(codes[step], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = MultiplyMxfp4<kRange>(a[i], Twice(scales[0][i % 2], step / 2));
    }
  }

  // 2^14 times a scale from 2^-28 to 1 is a float16.
  static constexpr uint32_t kLeastHalf = 99;
  __device__ static uint32_t NotSmallHalfBits(const char* scales) {
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(scales);
    const uint32_t least = (bytes & ~kHighestOfBytes) + (0x80 - kLeastHalf) * 0x01010101;
    return (bytes | ~least) & kHighestOfBytes;
  }

  // kSmall: what codes are multiplied by. kAny: the bytes where bfloat16 has its exponent, from
  // which DecodeHalf makes two factors. kRounded: bfloat16 scales. Where what is decoded is written
  // to shared memory, this way is the faster one (docs/lab).
  template <bool kFewRows, ScaleRange kRange>
  __device__ static void LoadHalfScales(const char* scales, int, uint32_t (&words)[1][2]) {
    if constexpr (kRange == ScaleRange::kRounded) {
      return LoadScales<kFewRows, ScaleRange::kAny>(scales, 0, words);
    }
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(scales);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t two = Permute(bytes, 0, r == 0 ? 0x4140 : 0x4342);
      words[0][r] = kRange == ScaleRange::kSmall
                        ? two * PowerOfTwo<kFewRows>(10) - (kLeastHalf - 1) * 0x04000400
                        : two * PowerOfTwo<kFewRows>(7);
    }
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void DecodeHalf(const uint32_t (&codes)[4], int step,
                                    const uint32_t (&scales)[1][2], uint32_t* a) {
    if constexpr (kRange == ScaleRange::kRounded) {
      return PackedCodesBase::DecodeHalf<kFewRows, kRange>(codes, step, scales, a);
    }
    E2M1HalfPairs(codes[step], a);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      HalfFactors by{0, scales[0][r]};
      if constexpr (kRange != ScaleRange::kSmall) by = HalfFactorsOf(scales[0][r]);
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        if constexpr (kRange != ScaleRange::kSmall) a[i] = Times(a[i], Twice(by.first, step / 2));
        a[i] = Times(a[i], Twice(by.second, step / 2));
      }
    }
  }

  // Pairs of float16 whose product is 2^14 times two scales, which come as `twos`, 2^(byte - 127)
  // in bfloat16. A code, 2^-14 of itself, is multiplied by the first, which is no less than 1 and
  // so rounds nothing, and by the second, which rounds as dequantize does. The first is of bytes
  // from 128 on, where the second is the largest power. From 144 on all codes but 0 become
  // infinite. The second of bytes up to 98 is 0, as all codes times it are.
  struct HalfFactors {
    uint32_t first, second;
  };
  __device__ static HalfFactors HalfFactorsOf(uint32_t twos) {
    constexpr uint32_t kByte = 0x00800080, kMore = 0x00400040;  // half as much more
    constexpr uint32_t kOne = 0x3c003c00;                       // of float16
    // From bfloat16 to float16, whose exponent is smaller by this and by 15.
    const auto halves = [](uint32_t least, uint32_t most, uint32_t value) {
      return (Min2<DType::kBF16>(Max2<DType::kBF16>(value, least), most) - least) * 8;
    };
    const uint32_t above = halves(113 * kByte, 143 * kByte + kMore, twos);
    const uint32_t below = halves(98 * kByte, 128 * kByte, twos);
    // NaN of 255, which came as infinite; as the same bits of either type.
    const uint32_t one = MultiplyAdd2<DType::kBF16>(twos, 0, kOne);
    return {Max2<DType::kF16>(above, one), Max2<DType::kF16>(below, above)};
  }

 private:
  __device__ static uint32_t Times(uint32_t a, uint32_t b) {
    return MultiplyAdd2<DType::kF16>(a, b, kMinusZeros);
  }

  // As bfloat16, those of row `r`.
  template <bool kFewRows, ScaleRange kRange>
  __device__ static uint32_t Scale(uint32_t bytes, int r) {
    const uint32_t two = Permute(bytes, 0, r == 0 ? 0x4140 : 0x4342);
    const uint32_t power = PowerOfTwo<kFewRows>(7);
    if constexpr (kRange == ScaleRange::kSmall) return two * power + 126 * 0x800080;
    // 0, of 2^-127, is subnormal; 255 is infinite so far, which times 0 is NaN.
    const uint32_t normal = two * power;
    return MultiplyAdd2<DType::kBF16>(normal, 0, Max2<DType::kBF16>(normal, 0x400040));
  }
};

template <>
struct LineCodes<Mode::kMxfp4, 4> : MxLineCodes<Mode::kMxfp4, 4, 126> {
  static constexpr bool kHasSmall = true;

  template <bool kFits>
  __device__ static uint32_t Pair(const uint32_t (&streams)[4], int p, const LineScales& line) {
    return Scaled<kFits>(E2M1Of(streams, p), line);
  }

  template <ScaleRange kRange>
  __device__ static uint32_t Word(const Loaded& loaded) {
    if constexpr (kRange == ScaleRange::kSmall) {
      return (loaded[0] + 126) * kTwice;
    } else {
      return Scales(loaded[0], 0, 0, true).scale;
    }
  }

  template <ScaleRange kRange>
  __device__ static uint32_t PairOf(const uint32_t* codes, int p, uint32_t word) {
    return MultiplyMxfp4<kRange>(E2M1Of(codes, p), word);
  }

  // 2^14 times a scale from 2^-28 to 1 is a float16.
  static constexpr bool kHasSmallHalves = true;
  static constexpr uint32_t kLeastHalf = 99;
  __device__ static uint32_t NotSmallHalves(const Loaded& loaded) {
    return loaded[0] | (~(loaded[0] + (0x80 - kLeastHalf)) & 0x80);
  }

  template <ScaleRange kRange>
  __device__ static uint32_t HalfWord(const Loaded& loaded) {
    if constexpr (kRange == ScaleRange::kSmall) {
      return (loaded[0] - (kLeastHalf - 1)) * 0x04000400;
    } else {
      return HalfFactors<14>(loaded[0]);
    }
  }

  template <ScaleRange kRange>
  __device__ static uint32_t HalfPairOf(const uint32_t* codes, int p, uint32_t word) {
    const uint32_t pair = E2M1HalvesOf(codes, p);
    return kRange == ScaleRange::kSmall ? TimesHalves(pair, word) : TimesFactors(pair, word);
  }
};

}  // namespace jgg::device

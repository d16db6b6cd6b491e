// A coder is a mode of quantize: it encodes the elements of a lane that are in one group. It has
//
//   kCount     how many: 32, or 16 where that is 64 bytes or a group
//   Part       what the group needs to know of a lane's elements; Of(x), and Join of two lanes'
//   Group      the group's scale, from the Part of all its elements and 1 / global_scale
//   Encode     codes as words; whether they may be wrong, so that Exactly has to be asked, which
//   can
//              only be where there is kDoubt
//   Finish     what is left to do with words
//   Scale      the bits of the scale that is stored; and Bias
//
// Also compiled for the host, for tests/quantized/test_quantize_host.py.
#pragma once

#include "quantized/device/encode.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

template <DType kOf_, int kBits_>
struct AffineCoder {
  static constexpr DType kOf = kOf_;
  static constexpr int kBits = kBits_, kCount = kOf == DType::kF32 ? 16 : 32;
  static constexpr bool kBias = true, kGlobal = false, kDoubt = true;
  using X = Elements<kOf, kCount>;
  using Part = Range;
  using Group = AffineGroup<kBits>;

  static JGG_HOST_DEVICE Part Of(const X& x) { return RangeOf(x); }
  static JGG_HOST_DEVICE Part Join(Part a, Part b) {
    return {Min(a.low, b.low), Max(a.high, b.high)};
  }
  static JGG_HOST_DEVICE Group Make(Part part, Inverse) { return MakeAffineGroup<kBits>(part); }
  static JGG_HOST_DEVICE bool Encode(const X& x, const Group& group, uint32_t, uint32_t* words) {
    EncodeAffine<kBits>(x, group, words);
    return !group.usual;
  }
  static JGG_HOST_DEVICE void Exactly(const X& x, const Group& group, uint32_t* words) {
    EncodeAnyAffine<kBits>(x, group, words);
  }
  static JGG_HOST_DEVICE void Finish(const Group&, uint32_t*) {}
  static JGG_HOST_DEVICE uint32_t Scale(const Group& group) { return Narrow<kOf>(group.scale); }
  static JGG_HOST_DEVICE uint32_t Bias(const Group& group) { return Narrow<kOf>(group.bias); }
};

// mxfp4, mxfp8.
template <DType kOf_, int kBits_>
struct MxCoder {
  static constexpr DType kOf = kOf_;
  static constexpr int kBits = kBits_, kCount = kOf == DType::kF32 ? 16 : 32;
  static constexpr bool kBias = false, kGlobal = false, kDoubt = false;
  using X = Elements<kOf, kCount>;
  using Part = float;
  using Group = MxGroup;

  static JGG_HOST_DEVICE Part Of(const X& x) { return LargestMagnitude(x); }
  static JGG_HOST_DEVICE Part Join(Part a, Part b) { return Max(a, b); }
  static JGG_HOST_DEVICE Group Make(Part part, Inverse) { return MakeMxGroup<kBits>(part); }
  static JGG_HOST_DEVICE bool Encode(const X& x, const Group& group, uint32_t, uint32_t* words) {
    if constexpr (kBits == 8) {
      EncodeE4M3(x, group.factor, words);
    } else if constexpr (kOf == DType::kF32) {
      const auto y = [&](int i) { return Multiply(fabsf(x[i]), group.factor); };
      EncodeE2M1(x, y, words);
    } else {
      EncodeE2M1Pairs(x, group.factor, words);
    }
    return false;
  }
  static JGG_HOST_DEVICE void Exactly(const X&, const Group&, uint32_t*) {}
  static JGG_HOST_DEVICE void Finish(const Group& group, uint32_t* words) {
    JGG_UNROLL
    for (int i = 0; i < kBits * kCount / 32; ++i) words[i] = group.dead ? 0 : words[i];
  }
  static JGG_HOST_DEVICE uint32_t Scale(const Group& group) { return group.byte; }
};

template <DType kOf_, bool kGlobal_>
struct Nvfp4Coder {
  static constexpr DType kOf = kOf_;
  static constexpr int kBits = 4, kCount = 16;
  static constexpr bool kBias = false, kGlobal = kGlobal_;
  static constexpr bool kDoubt = kGlobal && kOf != DType::kF32;
  using X = Elements<kOf, kCount>;
  using Part = float;
  struct Group : Nvfp4Group {
    float largest;
    uint32_t signs;  // of the codes of a negative global scale
  };

  static JGG_HOST_DEVICE Part Of(const X& x) { return LargestMagnitude(x); }
  static JGG_HOST_DEVICE Part Join(Part a, Part b) { return Max(a, b); }
  static JGG_HOST_DEVICE Group Make(Part part, Inverse inverse) {
    const uint32_t signs = kGlobal && AsBits(inverse.value) >> 31 != 0 ? 0x88888888 : 0;
    return {MakeNvfp4Group<kGlobal>(part, inverse), part, signs};
  }
  static JGG_HOST_DEVICE bool Encode(const X& x, const Group& group, uint32_t times,
                                     uint32_t* words) {
    if constexpr (kOf == DType::kF32) {
      EncodeAnyNvfp4<kGlobal>(x, group, words);
    } else if constexpr (kGlobal) {
      return !EncodeNvfp4(x, group.largest, group, times, words) && !group.dead;
    } else {
      EncodeE2M1Pairs(x, group.reciprocal, words);
    }
    return false;
  }
  static JGG_HOST_DEVICE void Exactly(const X& x, const Group& group, uint32_t* words) {
    EncodeAnyNvfp4<kGlobal>(x, group, words);
  }
  static JGG_HOST_DEVICE void Finish(const Group& group, uint32_t* words) {
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) words[i] = group.dead ? 0 : words[i] ^ group.signs;
  }
  static JGG_HOST_DEVICE uint32_t Scale(const Group& group) { return group.byte; }
};

template <DType kOf, typename Format, bool kGlobal>
constexpr auto CoderOf() {
  if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
    return AffineCoder<kOf, Format::kBits>{};
  } else if constexpr (Format::kScale == ScaleType::kE8M0) {
    return MxCoder<kOf, Format::kBits>{};
  } else {
    static_assert(Format::kScale == ScaleType::kE4M3);
    return Nvfp4Coder<kOf, kGlobal>{};
  }
}

// function(coder) for the coder of a format: its type is what counts.
template <DType kOf, typename Function>
auto DispatchCoder(Mode mode, int bits, bool global, Function&& function) {
  return LinearFormats::Dispatch(mode, bits, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kTakesGlobalScale) {
      if (global) return function(CoderOf<kOf, Format, true>());
    }
    return function(CoderOf<kOf, Format, false>());
  });
}

}  // namespace jgg::device

// Mode "affine": code * scale + bias. Lines of codes are bit streams, of any width but 7.
//
// How kernels decode it in registers: device/formats/affine.cuh.
#pragma once

#include "quantized/format.h"

namespace jgg {

template <int kBits>
struct FormatTraits<Mode::kAffine, kBits> : FormatBase {
  static constexpr std::string_view kName = "affine";
  static constexpr CodeType kCode = CodeType::kInteger;
  static constexpr ScaleType kScale = ScaleType::kScaleAndBias;
  static constexpr std::array kGroupSizes{16, 32, 64, 128};
  static constexpr int kLeastGroupSm90 = 32;
  static constexpr bool kPackedByWarps = kBits == 8;
  static constexpr int kLinearBlocksPerSm = kBits == 8 ? 1 : 2;

  // A word is scale and bias in 16 bits each. Groups of 32 have two words for a row of 64 k, those
  // of 16 four, and those of 128 share words. A scale and a bias in float32 are two words.
  static constexpr PackedScales PackedScalesOf(int group_size) {
    return group_size == 128 ? PackedScales{128, 64} : PackedScales{64, 64 * 64 / group_size};
  }
};

}  // namespace jgg

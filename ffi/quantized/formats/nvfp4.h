// Mode "nvfp4": floats of 4 bits, of which 16 share one of 8 bits; float32 may scale those.
//
// How kernels decode it in registers: device/formats/nvfp4.cuh.
#pragma once

#include "quantized/format.h"

namespace jgg {

template <>
struct FormatTraits<Mode::kNvfp4, 4> : FormatBase {
  static constexpr std::string_view kName = "nvfp4";
  static constexpr CodeType kCode = CodeType::kE2M1;
  static constexpr ScaleType kScale = ScaleType::kE4M3;
  static constexpr std::array kGroupSizes{16};
  static constexpr int kLeastGroupSm90 = 16;
  static constexpr int kScalesOf32 = 2;
  static constexpr bool kTakesGlobalScale = true;
  static constexpr bool kIsOrdered = true;

  // A word is four scales.
  static constexpr PackedScales PackedScalesOf(int) { return {64, 64}; }
};

}  // namespace jgg

// Mode "mxfp8", of the OCP Microscaling specification: floats of 8 bits, of which 32 share a power
// of two.
//
// How kernels decode it in registers: device/formats/mxfp8.cuh.
#pragma once

#include "quantized/format.h"

namespace jgg {

template <>
struct FormatTraits<Mode::kMxfp8, 8> : FormatBase {
  static constexpr std::string_view kName = "mxfp8";
  static constexpr CodeType kCode = CodeType::kE4M3;
  static constexpr ScaleType kScale = ScaleType::kE8M0;
  static constexpr std::array kGroupSizes{32};
  static constexpr int kLeastGroupSm90 = 32;
  static constexpr bool kIsPrepacked = false;

  // A word is two scales in bfloat16.
  static constexpr PackedScales PackedScalesOf(int) { return {64, 64}; }
};

}  // namespace jgg

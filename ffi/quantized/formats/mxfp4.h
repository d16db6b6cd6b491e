// Mode "mxfp4", of the OCP Microscaling specification: floats of 4 bits, of which 32 share a power
// of two.
//
// How kernels decode it in registers: device/formats/mxfp4.cuh.
#pragma once

#include "quantized/format.h"

namespace jgg {

template <>
struct FormatTraits<Mode::kMxfp4, 4> : FormatBase {
  static constexpr std::string_view kName = "mxfp4";
  static constexpr CodeType kCode = CodeType::kE2M1;
  static constexpr ScaleType kScale = ScaleType::kE8M0;
  static constexpr std::array kGroupSizes{32};
  static constexpr int kLeastGroupSm90 = 32;

  // A word has two bytes of either row.
  static constexpr PackedScales PackedScalesOf(int) { return {64, 32}; }
};

}  // namespace jgg

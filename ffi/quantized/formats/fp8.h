// Mode "fp8": floats of 8 bits in blocks of rows and columns, each with a float32. Hopper's kernels
// read it (qmm_fp8), and layout "sm90": prepack_fp8 makes that, with a scale for 128 k of every
// row.
//
// How kernels decode it in registers: device/formats/fp8.cuh.
#pragma once

#include "quantized/format.h"

namespace jgg {

template <>
struct FormatTraits<Mode::kFp8, 8> : FormatBase {
  static constexpr std::string_view kName = "fp8";
  static constexpr CodeType kCode = CodeType::kE4M3;
  static constexpr ScaleType kScale = ScaleType::kFloat32;
  static constexpr std::array kGroupSizes{128};
  static constexpr int kLeastGroupSm90 = 128;
  static constexpr bool kIsLinear = false, kIsPrepacked = false;
  static constexpr int kLinearBlocksPerSm = 1;

  // A word is two bfloat16, whose sum is the scale.
  static constexpr PackedScales PackedScalesOf(int) { return {128, 64}; }
};

}  // namespace jgg

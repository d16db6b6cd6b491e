// What a format of quantized weights is: FormatTraits<mode, bits>, in formats/ a file for each
// mode. formats.h lists them.
#pragma once

#include <array>
#include <string_view>

namespace jgg {

// Tests know a mode by its number.
enum class Mode { kAffine, kMxfp4, kMxfp8, kNvfp4, kFp8 };

// What a code stands for until it meets its scale.
enum class CodeType {
  kInteger,  // a whole number from 0 on
  kE2M1,     // a float of 4 bits
  kE4M3,     // a float of 8 bits, without infinities; 0x7f and 0xff are NaN
};

// What a group of codes has in layout "linear".
enum class ScaleType {
  kScaleAndBias,  // two floats of one dtype
  kE8M0,          // a byte that is a power of two; 255 is NaN
  kE4M3,          // a byte that is a float, whose sign does not count
  kFloat32,       // of a block of rows and columns
};

// Scales (and biases) of layout "sm90": those of 64 rows and `k` values of k are `words` uint32, or
// twice as many where they are float32.
struct PackedScales {
  int k, words;
};

// A format has what FormatBase says, and
//
//   kName             as jax_groupgemm calls its mode
//   kCode, kScale     see above
//   kGroupSizes       how many codes may share a scale, the fewest first
//   kLeastGroupSm90   how many share one at least in Hopper's kernels
//   PackedScalesOf    of layout "sm90", for a group size
template <Mode kMode, int kBits>
struct FormatTraits;

// What most formats have in common.
struct FormatBase {
  // Scales of 32 codes in layout "linear", in the smallest groups that Hopper's kernels take: 2, or
  // 1 that more codes may share.
  static constexpr int kScalesOf32 = 1;
  // Whether float32 numbers may multiply all of an array, a group of W, or a column.
  static constexpr bool kTakesGlobalScale = false;
  // Whether kernels read layout "linear", and those of quantize and dequantize know it.
  static constexpr bool kIsLinear = true;
  // Whether Hopper's kernels read lines of codes as they are stored.
  static constexpr bool kHasLinesSm90 = true;
  // Whether the kernel of prepack makes layout "sm90" from it. Others have a kernel of their own,
  // or the definition makes it.
  static constexpr bool kIsPrepacked = true;
  // The Hopper kernels of few rows. In layout "sm90": whether warps always multiply, because WGMMA
  // would spill. In layout "linear": blocks of a multiprocessor that registers allow.
  static constexpr bool kPackedByWarps = false;
  static constexpr int kLinearBlocksPerSm = 2;
  // Whether dequantize has columns in the order of device/dequantize.cuh.
  static constexpr bool kIsOrdered = false;
};

// Words of scales that a row of 64 k has at most, in layout "sm90", where kernels read it.
template <typename Format>
inline constexpr int kMostScaleWordsOf =
    (Format::PackedScalesOf(Format::kLeastGroupSm90).words + 63) / 64;

}  // namespace jgg

// Quantized weights as handlers and kernels see them; jax_groupgemm/_quantized/array.py is their
// definition.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

// kFp8 exists in layout "sm90" only.
enum class Mode { kAffine, kMxfp4, kMxfp8, kNvfp4, kFp8 };

// How the codes of a group become values.
struct Coding {
  Mode mode;
  int bits;
  DType scale_dtype;  // kAffine: of scales and biases; the other modes have bytes

  constexpr int ScaleBytes() const { return mode == Mode::kAffine ? Size(scale_dtype) : 1; }
};

// Scales (and biases) of layout "sm90": those of 64 rows and `k` values of k are `words` uint32.
struct PackedScales {
  int k, words;
};

constexpr PackedScales PackedScalesOf(Mode mode, int group_size) {
  if (mode == Mode::kMxfp4) return {64, 32};
  if (mode == Mode::kFp8) return {128, 64};
  if (mode != Mode::kAffine) return {64, 64};
  return group_size == 128 ? PackedScales{128, 64} : PackedScales{64, 64 * 64 / group_size};
}

// Float32: one, one per group, or one per group and column of W.
struct GlobalScale {
  const float* data;      // null where there is none
  int64_t group, column;  // from one to the next; 0 where all share one

  constexpr float At(int64_t g, int64_t n) const { return data[g * group + n * column]; }
};

// Matrices of lines: rows of W, or columns where W is transposed. A line is a bit stream of
// `elements` codes, of which every `group_size` share a scale (and a bias).
struct QuantizedWeight {
  Coding coding;
  int group_size;
  const void* packed;  // (groups, lines, elements * bits / 32) uint32
  const void* scales;  // (groups, lines, elements / group_size)
  const void* biases;  // likewise; null where the mode has none
  int64_t groups, lines, elements;
  GlobalScale global_scale;
};

// A weight in layout "sm90", see gemm_sm90.h.
struct PackedCodesSm90 {
  const void* codes;
  int column_tiles, k_tiles;  // of a weight
  int tile_scales;            // affine: bytes of scales and biases of a tile
};

}  // namespace jgg

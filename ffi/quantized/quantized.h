// Quantized weights as handlers and kernels see them; jax_groupgemm/_quantized/array.py is their
// definition.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "quantized/formats.h"

namespace jgg {

// How the codes of a group become values: formats.h.
struct Coding {
  Mode mode;
  int bits;
  DType scale_dtype;  // of scales and biases that are floats; others are bytes

  constexpr const FormatFacts& Facts() const { return FactsOf(mode); }
  constexpr bool HasFloatScales() const { return Facts().scale == ScaleType::kScaleAndBias; }
  constexpr int ScaleBytes() const { return HasFloatScales() ? Size(scale_dtype) : 1; }
};

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
  int lines_each;      // mode "fp8": lines that share scales
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
  bool half_scales;           // they are float16
  bool float_scales;          // ... or float32
  bool tiles_share;           // two tiles of k share scales
  int tile_groups;            // groups of a tile's row
};

}  // namespace jgg

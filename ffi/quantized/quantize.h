// quantize: w (..., K), in groups along K, to codes, scales and biases, as
// jax_groupgemm/_quantized/in_groups.py defines them; dequantize: these to values; prepack: these
// to another layout, as jax_groupgemm/_quantized/prepack.py defines it.
#pragma once

#include <cstdint>

#include "grouped_mm/segments.h"
#include "quantized/quantized.h"

namespace jgg {

// Layout "linear". Arrays are contiguous, so that axes do not matter: one group follows another.
struct QuantizedArray {
  Coding coding;
  int group_size;
  int64_t elements;
  void *weight, *scales, *biases;  // biases: null where the mode has none
  const float* global_scale;       // null where there is none
  int64_t global_scales;           // each of as many elements
};

struct QuantizeArgs {
  const void* w;
  DType dtype;  // of w, and of affine scales
  QuantizedArray q;
  int64_t matrices, k, n;  // with matrices, w is (matrices, k, n), and q of (matrices * n, k)
};

struct DequantizeArgs {
  QuantizedArray q;
  void* out;
  DType dtype;   // of out
  bool ordered;  // nvfp4: columns of out as device/dequantize.cuh says
};

// A matrix (rows, k) in layout "linear", both multiples of 64, to layout "sm90".
struct PrepackArgs {
  QuantizedArray q;
  int64_t rows, k;
  void *weight, *scales;  // tiles of 64 x 64 in 128 * bits words; see PackedScales
};

// Matrices (groups, n, k) in mode "fp8", of e4m3 codes, likewise: n a multiple of 64, k of 128.
struct PrepackFp8Args {
  const void* weight;
  const float* scales;  // (groups, scale_rows, scale_columns), each of a block
  void *out, *out_scales;
  int64_t groups, n, k, scale_rows, scale_columns;
  int64_t block_rows, block_columns;  // columns: whole 128, or all
  bool some;                          // of the matrices, those that metadata gives rows
  Metadata metadata;
};

}  // namespace jgg

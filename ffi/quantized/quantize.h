// quantize: w (..., K), in groups along K, to codes, scales and biases, as
// jax_groupgemm/_formats.py defines them; dequantize: these to values.
#pragma once

#include <cstdint>

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
};

struct DequantizeArgs {
  QuantizedArray q;
  void* out;
  DType dtype;  // of out
};

}  // namespace jgg

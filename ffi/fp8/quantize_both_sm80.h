// The kernel of fp8_quantize_both, on any GPU: x (M, R, C) to e4m3 codes of blocks of 128 x 128,
// stored as x is and transposed, rounded to nearest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

struct Fp8QuantizeBothSm80 {
  DType dtype;
  const void* x;  // (M, R, C)
  int64_t matrices, rows, columns;
  void* codes;    // (M, R, C)
  float* scales;  // (M, R / 128, C / 128), rounded up
  void* turned;   // (M, C, R)
  float* turned_scales;
};

cudaError_t LaunchFp8QuantizeBothSm80(cudaStream_t stream, const Fp8QuantizeBothSm80& args);

}  // namespace jgg

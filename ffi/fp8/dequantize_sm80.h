// The kernel of fp8_dequantize, on any GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

struct Fp8DequantizeSm80 {
  DType dtype;  // of the result
  bool e5m2;
  bool square;        // a scale is that of 128 x 128, not of 1 x 128
  const void* codes;  // (M, R, C); M * R * C is less than 2^33, and C a multiple of 8
  const float* scales;
  int64_t matrices, rows, columns;
  void* out;
};

cudaError_t LaunchFp8DequantizeSm80(cudaStream_t stream, const Fp8DequantizeSm80& args);

}  // namespace jgg

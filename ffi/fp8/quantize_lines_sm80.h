// The kernel of fp8_quantize_lines, on any GPU: bfloat16 x (R, C), of grouped rows, to e4m3 codes
// in blocks of 128 along C, stored as x is, and in blocks of 128 along R, stored transposed. They
// are rounded to nearest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fp8/codes.h"
#include "fp8/groups.h"

namespace jgg {

struct Fp8QuantizeLinesSm80 {
  const void* x;  // (R, C)
  int64_t rows, columns;
  const int32_t* sizes;  // (G,)
  int64_t groups;
  int64_t along;                 // padded rows
  Fp8Codes by_rows, by_columns;  // (R, C) and (C, along)
  void* workspace;               // of Fp8GroupsWords(groups, along / 128)
};

// Rows of no group become zeros.
cudaError_t LaunchFp8QuantizeLinesSm80(cudaStream_t stream, const Fp8QuantizeLinesSm80& args);

}  // namespace jgg

// The kernels of fp8_quantize, on any GPU: x (M, R, C) to codes and scales of blocks of 128 along
// C, or along R, or of 128 x 128; where blocks lie along R the result is stored transposed. R may
// be grouped, where M is 1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "fp8/groups.h"

namespace jgg {

struct Fp8QuantizeSm80 {
  DType dtype;
  bool e5m2;
  const void* x;  // (M, R, C), or with a list (1, x_lines, C)
  int64_t matrices, rows, columns;
  bool along_rows, square;
  bool power_of_two;     // scales are
  const int32_t* sizes;  // (G,), or null
  int64_t groups;
  const int32_t* list;  // (R,): the line of x that each row is, or null; blocks lie along R
  int64_t x_lines;
  const uint32_t* seed;  // two words, or null: round to nearest
  int64_t along;         // elements of a line of the result
  void* codes;
  float* scales;
  void* workspace;  // 4 * workspace_words() bytes

  int64_t blocks() const { return (along + 127) / 128; }  // to a line of the result
  int64_t workspace_words() const {
    return sizes == nullptr ? 0 : Fp8GroupsWords(groups, along_rows ? blocks() : 0);
  }
};

template <DType kOf>
cudaError_t LaunchFp8QuantizeSm80Instance(cudaStream_t stream, const Fp8QuantizeSm80& args);

cudaError_t LaunchFp8QuantizeSm80(cudaStream_t stream, const Fp8QuantizeSm80& args);

}  // namespace jgg

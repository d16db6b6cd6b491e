// The kernels of fp8_quantize, on any GPU: x (M, R, C) to codes and scales of blocks of 128 along
// C, or along R, or of 128 x 128; where blocks lie along R the result is stored transposed. R may
// be grouped, where M is 1. Both results come of one read: see both().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "fp8/codes.h"
#include "fp8/groups.h"

namespace jgg {

struct Fp8QuantizeSm80 {
  DType dtype;
  bool e5m2;
  const void* x;  // (M, R, C), or with a list (1, x_lines, C)
  int64_t matrices, rows, columns;
  bool square;
  bool power_of_two;     // scales are
  const int32_t* sizes;  // (G,), or null
  int64_t groups;
  const int32_t* list;  // (R,): the line of x that each row is, or null; blocks lie along R
  int64_t x_lines;
  int64_t along;        // R, of groups padded: elements of a line of by_columns
  Fp8Codes by_rows;     // (M, R, C), along C; its codes are null where nobody asks for them
  Fp8Codes by_columns;  // (M, C, along), along R; likewise
  void* workspace;      // 4 * workspace_words() bytes

  bool along_rows() const { return by_columns.codes != nullptr; }
  // Then codes are e4m3, rounded to nearest, scales any float32, and R and C multiples of 16. Of
  // blocks that are not square, x is bfloat16 and has groups.
  bool both() const { return by_rows.codes != nullptr && along_rows(); }
  int64_t workspace_words() const {
    return sizes == nullptr ? 0 : Fp8GroupsWords(groups, along_rows() ? (along + 127) / 128 : 0);
  }
};

template <DType kOf>
cudaError_t LaunchFp8QuantizeSm80Instance(cudaStream_t stream, const Fp8QuantizeSm80& args);

cudaError_t LaunchFp8QuantizeSm80(cudaStream_t stream, const Fp8QuantizeSm80& args);

}  // namespace jgg

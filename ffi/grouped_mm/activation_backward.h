// The backward pass of an activation, of rows: jax_groupgemm/_grouped/activation_backward.py is the
// definition.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "grouped_mm/mm.h"

namespace jgg {

struct ActivationBackwardArgs {
  Activation activation;
  DType dtype;             // bf16 or f16, of h, d, dh and activated
  const void* h;           // (rows, n)
  const void* d;           // (rows, columns): the cotangent of what the activation gives
  const float* row_scale;  // (rows,), or null: 1; multiplies dh and activated
  void* dh;                // (rows, n)
  void* activated;         // (rows, columns), or null
  float* row_sums;         // (rows,): of d times what the activation gives; with `activated`
  int64_t rows, n, columns;
  const int32_t* live_rows;  // (): only so many are read and written; or null
};

// `columns` is a multiple of 8, arrays are 16-byte aligned.
cudaError_t ActivationBackward(cudaStream_t stream, const ActivationBackwardArgs& args);

}  // namespace jgg

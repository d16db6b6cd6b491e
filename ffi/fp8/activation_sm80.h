// Gated activations beside FP8's quantizer, on any GPU. jax_groupgemm/_fp8/activation.py is the
// definition.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fp8/codes.h"
#include "fp8/groups.h"
#include "grouped_mm/mm.h"

namespace jgg {

// What both passes have: h (rows, 2 * columns) in bfloat16, of grouped rows.
struct Fp8ActivationSm80 {
  Activation activation;
  const void* h;
  int64_t rows, columns;
  const int32_t* sizes;  // (groups,)
  int64_t groups;
  void* workspace;  // of Fp8GroupsWords(groups, padded tiles of 128 rows; none in the forward pass)
};

// Writes the codes of activation(h), (rows, columns), along columns.
cudaError_t LaunchFp8ActivationSm80(cudaStream_t stream, const Fp8ActivationSm80& args,
                                    const Fp8Codes& to);

// Codes of row_scale * dh along columns, (rows, 2 * columns); of the same along rows; and of
// row_scale * activation(h) along rows. Both of the latter are transposed, with `along` padded
// rows. `columns` is a multiple of 128. dh has a seed of its own each way, or neither has one.
struct Fp8ActivationBackwardSm80 {
  Fp8ActivationSm80 of;
  const void* d;           // (rows, columns): the cotangent of activation(h)
  const float* row_scale;  // (rows,)
  int64_t along;
  Fp8Codes by_rows, by_columns, activated;
  float* sums;  // (columns / 128, rows): of d * activation(h)
};

cudaError_t LaunchFp8ActivationBackwardSm80(cudaStream_t stream,
                                            const Fp8ActivationBackwardSm80& args);

}  // namespace jgg

// Gated activations that are cast with known scales, on any GPU; or their largest magnitudes, of
// which scales are made. jax_groupgemm/_fp8/activation_cast.py is the definition.
#pragma once

#include "fp8/activation_sm80.h"

namespace jgg {

// Codes of activation(h), (rows, columns).
struct Fp8ActivationCastSm80 {
  Fp8ActivationSm80 of;
  const float* scales;  // (1,), or null: there are no codes
  void* codes;
  void* largest;  // (parts, 2)
  int64_t parts;
};

cudaError_t LaunchFp8ActivationCastSm80(cudaStream_t stream, const Fp8ActivationCastSm80& args);

// Codes of row_scale * dh, (rows, 2 * columns); the same transposed, with `along` padded rows; and
// of row_scale * activation(h), transposed. `columns` is a multiple of 128.
struct Fp8ActivationCastBackwardSm80 {
  Fp8ActivationSm80 of;
  const void* d;           // (rows, columns): the cotangent of activation(h)
  const float* row_scale;  // (rows,)
  int64_t along;
  const float* scales;  // (2,), of dh and of the activation; or null: there are no codes
  bool e5m2;            // codes of dh are
  void *codes, *turned, *activated;
  float* sums;    // (columns / 128, rows): of d * activation(h)
  void* largest;  // (parts, 2, 2): of dh and of the activation
  int64_t parts;  // along / 128 * columns / 128 where there are codes
};

cudaError_t LaunchFp8ActivationCastBackwardSm80(cudaStream_t stream,
                                                const Fp8ActivationCastBackwardSm80& args);

}  // namespace jgg

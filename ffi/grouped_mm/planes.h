// Two float32 operands of a product as bfloat16 planes: jax_groupgemm/_grouped/planes.py is the
// definition.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jgg {

// Lines of `n` floats; in the result each is `planes` lines of `out_n` values, one after another.
// Groups of `lines` lines become groups of `out_lines`. What is added is zeros.
struct PlanesArgs {
  const float* from;
  void* to;
  int64_t groups, lines, n, out_lines, out_n;
};

// Both in one launch. `out_n` are multiples of 8, results 16-byte aligned.
cudaError_t MakePlanes(cudaStream_t stream, const PlanesArgs& a, const PlanesArgs& b, int planes);

}  // namespace jgg

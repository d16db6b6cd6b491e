// Addends of the sm80 kernels' epilogues: a bias before the activation, existing results after it.
#pragma once

#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "grouped_mm/gemm_sm80.h"

namespace jgg::device {

// The bias of a tile's columns, from `column` on.
template <int kWidth>
__device__ void AddBias(const GemmSm80& gemm, const Tile& tile, int64_t column,
                        float (&values)[kWidth]) {
  const int64_t from = tile.weight * gemm.n + tile.n0 + column;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    values[j] += LoadFloat(gemm.epilogue.bias, from + j, gemm.epilogue.bias_dtype);
  }
}

// What the result holds at `at`.
template <int kWidth>
__device__ void AddExisting(const GemmSm80& gemm, int64_t at, float (&values)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] += LoadFloat(gemm.out, at + j, gemm.out_dtype);
}

}  // namespace jgg::device

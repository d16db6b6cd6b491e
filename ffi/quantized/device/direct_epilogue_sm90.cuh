// From sums of direct_sm90.cuh to results.
#pragma once

#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "quantized/device/direct_sm90.cuh"

namespace jgg::device {

struct DirectEpilogue {
  __device__ static void Store(const DirectGemmSm90& gemm, int weight, int row, int column,
                               float value, float other, bool gated) {
    const Epilogue& epilogue = gemm.epilogue;
    if (epilogue.bias != nullptr) {
      const int64_t at = static_cast<int64_t>(weight) * gemm.n + column;
      value += LoadFloat(epilogue.bias, at, epilogue.bias_dtype);
      if (gated) other += LoadFloat(epilogue.bias, at + gemm.n / 2, epilogue.bias_dtype);
    }
    if (gated) {
      Gate<false, 1>(epilogue.activation, &value, &other);
    } else {
      float values[1] = {value};
      Activate(epilogue.activation, values);
      value = values[0];
    }
    if (epilogue.row_scale != nullptr) {
      value *= LoadFloat(epilogue.row_scale, row, epilogue.row_scale_dtype);
    }
    Write(gemm, row, column, gated, value);
  }

  __device__ static void StoreZero(const DirectGemmSm90& gemm, int row, int column, bool gated) {
    Write(gemm, row, column, gated, 0.0f);
  }

 private:
  __device__ static void Write(const DirectGemmSm90& gemm, int row, int column, bool gated,
                               float value) {
    const int64_t line = gated ? gemm.n / 2 : gemm.n;
    StoreFloat(gemm.out, row * line + column, gemm.out_dtype, value);
  }
};

}  // namespace jgg::device

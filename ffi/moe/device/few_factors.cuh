// Factors and biases of a few tokens' experts, and rounding.
#pragma once

#include <cstdint>

#include "moe/few_tokens.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

// The factor of an expert's column of sums, and its bias.
template <typename Weights, typename Finish>
struct FewFactors {
  float scale, bias;

  __device__ FewFactors(const FewTokensWeight& w, int expert, int columns, int column)
      : scale(Weights::kFactor), bias(0.0f) {
    if (w.global_scale.data != nullptr) scale *= w.global_scale.At(expert, column);
    if (w.bias != nullptr) {
      bias = Finish::Load(w.bias, static_cast<int64_t>(expert) * columns + column, w.bias_dtype);
    }
  }
  __device__ float Of(float sum) const { return sum * scale + bias; }
};

__device__ inline float RoundedToBFloat16(float value) {
  return Half<DType::kBF16>(Round2<DType::kBF16>(value, value), 0);
}

}  // namespace jgg::device

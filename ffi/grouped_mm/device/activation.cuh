// Activations of float32 values, and how epilogues load and store them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/numeric_types.h"
#include "grouped_mm/mm.h"

namespace jgg::device {

__device__ inline float LoadFloat(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return static_cast<float>(static_cast<const cutlass::bfloat16_t*>(data)[index]);
    case DType::kF16: return static_cast<float>(static_cast<const cutlass::half_t*>(data)[index]);
    case DType::kF32: break;
  }
  return static_cast<const float*>(data)[index];
}

__device__ inline void StoreFloat(void* data, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<cutlass::bfloat16_t*>(data)[index] = cutlass::bfloat16_t(value);
      return;
    case DType::kF16: static_cast<cutlass::half_t*>(data)[index] = cutlass::half_t(value); return;
    case DType::kF32: break;
  }
  static_cast<float*>(data)[index] = value;
}

__device__ inline float Silu(float x) { return x / (1.0f + expf(-x)); }

__device__ inline float Gelu(float x) {  // the tanh form
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

template <int kWidth, typename Function>
__device__ void ApplyToEach(float (&values)[kWidth], Function function) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = function(values[j]);
}

template <int kWidth>
__device__ void Activate(Activation activation, float (&values)[kWidth]) {
  switch (activation) {
    case Activation::kNone: return;
    case Activation::kSilu:
    case Activation::kSwiglu: return ApplyToEach(values, Silu);
    case Activation::kGelu:
    case Activation::kGeglu: return ApplyToEach(values, Gelu);
    case Activation::kRelu:  // keeps NaN
      return ApplyToEach(values, [](float x) { return x < 0.0f ? 0.0f : x; });
    case Activation::kTanh: return ApplyToEach(values, [](float x) { return tanhf(x); });
  }
}

// Two values in one word, rounded to nearest, by one instruction.
template <typename T>
__device__ uint32_t Pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, cutlass::bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

}  // namespace jgg::device

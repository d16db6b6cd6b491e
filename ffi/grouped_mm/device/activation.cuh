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

// x times the logistic function of y. kFast: in six instructions, whose error is that of the
// argument of 2^y, |y| * 2^-24 of the result.
template <bool kFast>
__device__ float TimesLogistic(float x, float y) {
  return kFast ? __fdividef(x, 1.0f + __expf(-y)) : x / (1.0f + expf(-y));
}

template <bool kFast>
__device__ float Silu(float x) {
  return TimesLogistic<kFast>(x, x);
}

template <bool kFast>
__device__ float Gelu(float x) {  // the tanh form
  const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return kFast ? TimesLogistic<true>(x, 2.0f * y) : 0.5f * x * (1.0f + tanhf(y));
}

// The normal distribution's integral up to x, of relative error 1.2e-7: the complementary error
// function of z is t * exp(-z^2 + a polynomial of t), where t = 1 / (1 + z / 2) (Press et al.,
// Numerical Recipes, section 6.2). CUDA's own takes more registers than these kernels have.
__device__ inline float Normal(float x) {
  const float z = 0.7071067811865476f * fabsf(x), t = __fdividef(1.0f, 1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = 0.5f * t * expf(p - z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}

// All that are not gated keep NaN.
__device__ inline float Relu(float x) { return x < 0.0f ? 0.0f : x; }

template <int kWidth, typename Function>
__device__ void ApplyToEach(float (&values)[kWidth], Function function) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = function(values[j]);
}

template <int kWidth>
__device__ void Activate(Activation activation, float (&values)[kWidth]) {
  switch (activation) {
    case Activation::kSilu: return ApplyToEach(values, Silu<false>);
    case Activation::kGelu: return ApplyToEach(values, Gelu<false>);
    case Activation::kGeluErf: return ApplyToEach(values, [](float x) { return x * Normal(x); });
    case Activation::kRelu: return ApplyToEach(values, Relu);
    case Activation::kRelu2: return ApplyToEach(values, [](float x) { return Relu(x) * Relu(x); });
    case Activation::kTanh: return ApplyToEach(values, [](float x) { return tanhf(x); });
    default: return;
  }
}

// gates = function(gates, up)
template <int kWidth, typename Function>
__device__ void GateEach(float* gates, const float* up, Function function) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) gates[j] = function(gates[j], up[j]);
}

// min and max that keep NaN.
__device__ inline float AtMost(float x, float most) { return x > most ? most : x; }
__device__ inline float AtLeast(float x, float least) { return x < least ? least : x; }

template <bool kFast, int kWidth>
__device__ void Gate(Activation activation, float* gates, const float* up) {
  switch (activation) {
    case Activation::kSwiglu:
      return GateEach<kWidth>(gates, up, [](float x, float y) { return Silu<kFast>(x) * y; });
    case Activation::kGeglu:
      return GateEach<kWidth>(gates, up, [](float x, float y) { return Gelu<kFast>(x) * y; });
    case Activation::kReglu:
      return GateEach<kWidth>(gates, up, [](float x, float y) { return Relu(x) * y; });
    case Activation::kSwigluOai:
      return GateEach<kWidth>(gates, up, [](float x, float y) {
        x = AtMost(x, 7.0f);
        return (AtLeast(AtMost(y, 7.0f), -7.0f) + 1.0f) * TimesLogistic<kFast>(x, 1.702f * x);
      });
    default: return;
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

// How epilogues load and store values, and apply an activation (grouped_mm/activations.h) to them.
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

template <Activation kActivation>
__device__ Activated Differentiate(float x, float up) {
  using Of = ActivationOf<kActivation>;
  if constexpr (IsGated(kActivation)) {
    return Of::Differentiate(x, up);
  } else {
    return Of::Differentiate(x);
  }
}

// values = activation(values), of one that is not gated
template <int kWidth>
__device__ void Activate(Activation activation, float (&values)[kWidth]) {
  DispatchActivation<false>(activation, [&](auto of) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = decltype(of)::template Value<false>(values[j]);
  });
}

// gates = activation(gates, up), of one that is gated
template <bool kFast, int kWidth>
__device__ void Gate(Activation activation, float* gates, const float* up) {
  DispatchActivation<true>(activation, [&](auto of) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      gates[j] = decltype(of)::template Value<kFast>(gates[j], up[j]);
    }
  });
}

// Two values in one word, rounded to nearest, by one instruction.
#ifdef __CUDACC__
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
#else
template <typename T>
uint32_t Pack(float low, float high) {
  return T(low).raw() | uint32_t{T(high).raw()} << 16;
}
#endif

}  // namespace jgg::device

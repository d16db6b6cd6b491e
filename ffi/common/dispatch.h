// From run-time dtypes to types, by nested lambdas:
//   return DispatchFloat(dtype, [&](auto zero) { using T = decltype(zero); ... });
#pragma once

#include <optional>

#include "cutlass/numeric_types.h"

namespace jgg {

enum class DType { kF32, kBF16, kF16 };

inline const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
  }
  return "?";
}

template <typename Function>
auto DispatchFloat(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBF16: return function(cutlass::bfloat16_t{});
    case DType::kF16: return function(cutlass::half_t{});
    case DType::kF32: break;
  }
  return function(float{});
}

}  // namespace jgg

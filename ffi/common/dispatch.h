// From run-time values to types, by nested lambdas:
//   return DispatchFloat(dtype, [&](auto zero) { using T = decltype(zero); ... });
#pragma once

#include <type_traits>

#include "common/dtype.h"
#include "cutlass/numeric_types.h"

namespace jgg {

template <typename Function>
auto DispatchFloat(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBF16: return function(cutlass::bfloat16_t{});
    case DType::kF16: return function(cutlass::half_t{});
    case DType::kF32: break;
  }
  return function(float{});
}

template <typename Function>
auto DispatchBool(bool value, Function&& function) {
  return value ? function(std::true_type{}) : function(std::false_type{});
}

}  // namespace jgg

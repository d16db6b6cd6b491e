// From a dtype to a kernel's instance of it.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/dtype.h"
#include "common/sample.h"

namespace jgg {

// function(std::integral_constant<DType, dtype>{}). A sample has no float16.
template <typename Function>
cudaError_t DispatchDType(DType dtype, Function function) {
  switch (dtype) {
    case DType::kF32: return function(std::integral_constant<DType, DType::kF32>{});
    case DType::kBF16: return function(std::integral_constant<DType, DType::kBF16>{});
    case DType::kF16: break;
  }
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return function(std::integral_constant<DType, DType::kF16>{});
  }
}

}  // namespace jgg

// The dtypes and ranks that kernels of low rank are compiled for.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/dtype.h"
#include "common/sample.h"

namespace jgg {

// function(dtype, rank), both integral constants. It launches a kernel.
template <typename Dtype, typename Function>
cudaError_t DispatchRank(Dtype dtype, int rank, Function&& function) {
  switch (rank) {
    case 8: return function(dtype, std::integral_constant<int, 8>{});
    case 16: return function(dtype, std::integral_constant<int, 16>{});
    case 32: return function(dtype, std::integral_constant<int, 32>{});
    case 64: return function(dtype, std::integral_constant<int, 64>{});
    default: return cudaErrorInvalidValue;
  }
}

template <typename Function>
cudaError_t DispatchLora(DType dtype, int rank, Function&& function) {
  if (dtype == DType::kBF16) {
    return DispatchRank(std::integral_constant<DType, DType::kBF16>{}, rank, function);
  }
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return DispatchRank(std::integral_constant<DType, DType::kF16>{}, rank, function);
  }
}

}  // namespace jgg

// What launches of both kinds of kernels of a few tokens' experts share.
#pragma once

#include <cuda_runtime.h>

#include "grouped_mm/device/activation.cuh"

namespace jgg {
namespace device {

struct FewFinish {
  __device__ static float Load(const void* data, int64_t at, DType dtype) {
    return LoadFloat(data, at, dtype);
  }
  __device__ static void Store(void* data, int64_t at, DType dtype, float value) {
    StoreFloat(data, at, dtype, value);
  }
  template <bool kGated>
  __device__ static float Activate(Activation activation, float value, float other) {
    float values[1] = {value};
    if constexpr (kGated) {
      Gate<false, 1>(activation, values, &other);
    } else {
      device::Activate(activation, values);
    }
    return values[0];
  }
};

}  // namespace device

// More than a kernel may have without asking: 48 KiB, of which static shared memory has up to 8.
template <typename Kernel>
cudaError_t AllowBytes(Kernel kernel, int bytes) {
  if (bytes <= 40 << 10) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace jgg

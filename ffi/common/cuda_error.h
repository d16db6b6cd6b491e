// CUDA status codes as XLA FFI errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/error.h"

namespace jgg {

// A launch's result. What can fail here is the launch itself, never the kernel's run. The runtime
// remembers an error until it is asked for it, which the next launch does.
inline xla::ffi::Error FromCuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  (void)cudaGetLastError();
  std::string hint;
  if (status == cudaErrorNoKernelImageForDevice) {
    hint = "; this build has no code for this GPU, see python -m jax_groupgemm.info";
  } else if (status == cudaErrorInsufficientDriver) {
    hint = "; the NVIDIA driver is older than the CUDA version of this build";
  }
  return xla::ffi::Error(
      xla::ffi::ErrorCode::kInternal,
      StrCat("jgg.", op, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status), hint));
}

}  // namespace jgg

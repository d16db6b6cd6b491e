// Errors: one self-contained line each, "jgg.<op>: what, expected, got, remedy".
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jgg {

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
xla::ffi::Error InvalidArgument(const char* op, const Parts&... parts) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, StrCat("jgg.", op, ": ", parts...));
}

template <typename... Parts>
xla::ffi::Error Unimplemented(const char* op, const Parts&... parts) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented, StrCat("jgg.", op, ": ", parts...));
}

// A launch's result. What can fail here is the launch itself, never the kernel's run.
inline xla::ffi::Error FromCuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
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

#define JGG_RETURN_IF_ERROR(expression)        \
  do {                                         \
    xla::ffi::Error jgg_error = (expression);  \
    if (jgg_error.failure()) return jgg_error; \
  } while (false)

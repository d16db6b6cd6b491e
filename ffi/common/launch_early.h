// Launches a kernel that may begin before the one before it in the stream has ended.
#pragma once

#include <cuda_runtime.h>

namespace jgg {

// The kernel before it must be of the same call, and allow it (AllowNextKernel). Before
// WaitForPreviousKernel, this one may write nothing, and read nothing that the other one writes. In
// a CUDA graph that is captured the two have an edge of that kind.
template <typename Args>
cudaError_t LaunchEarly(void (*kernel)(Args), dim3 blocks, int threads, int bytes,
                        cudaStream_t stream, const Args& args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace jgg

// From run-time modes to instances of a Hopper kernel of quantized weights, which CMakeLists.txt
// compiles one by one.
#pragma once

#include <cuda_runtime_api.h>

#include "quantized/quantized.h"

namespace jgg {

// launch(FormatOf), of the one for a coding.
template <typename Launch>
cudaError_t LaunchInstanceSm90(Mode mode, int bits, Launch launch) {
  return Formats::Dispatch(mode, bits, [&](auto format) -> cudaError_t {
    if constexpr (decltype(format)::kHasKernels) {
      return launch(format);
    } else {
      return cudaErrorNoKernelImageForDevice;
    }
  });
}

}  // namespace jgg

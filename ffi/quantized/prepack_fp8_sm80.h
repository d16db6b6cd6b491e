// The kernel of prepack of mode "fp8": any GPU of compute capability 8.0 or newer that the build
// has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "quantized/quantize.h"

namespace jgg {

std::optional<std::string> prepack_fp8_sm80_unsupported(const PrepackFp8Args& args,
                                                        int compute_capability);
cudaError_t prepack_fp8_sm80(cudaStream_t stream, const PrepackFp8Args& args);

}  // namespace jgg

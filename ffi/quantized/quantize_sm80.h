// The kernel of quantize: any GPU of compute capability 8.0 or newer that the build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "quantized/quantize.h"

namespace jgg {

std::optional<std::string> quantize_sm80_unsupported(const QuantizeArgs& args,
                                                     int compute_capability);
cudaError_t quantize_sm80(cudaStream_t stream, const QuantizeArgs& args);

// Instances: quantize_sm80.cu.
template <DType kOf>
cudaError_t QuantizeSm80Instance(cudaStream_t stream, const QuantizeArgs& args);

}  // namespace jgg

// The kernel of dequantize: any GPU of compute capability 8.0 or newer that the build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "quantized/quantize.h"

namespace jgg {

std::optional<std::string> dequantize_sm80_unsupported(const DequantizeArgs& args,
                                                       int compute_capability);
cudaError_t dequantize_sm80(cudaStream_t stream, const DequantizeArgs& args);

// Instances: dequantize_sm80.cu.
template <DType kTo>
cudaError_t DequantizeSm80Instance(cudaStream_t stream, const DequantizeArgs& args);

}  // namespace jgg

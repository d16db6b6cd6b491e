// The sm80 kernel of qmm: any GPU of compute capability 8.0 or newer that the build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "quantized/qmm.h"

namespace jgg {

std::optional<std::string> qmm_sm80_unsupported(const QmmArgs& args, int compute_capability);
cudaError_t qmm_sm80(cudaStream_t stream, const QmmArgs& args);

}  // namespace jgg

// The sm80 kernel of wgrad: any GPU of compute capability 8.0 or newer that the build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/wgrad.h"

namespace jgg {

std::optional<std::string> wgrad_sm80_unsupported(const WgradArgs& args, int compute_capability);
cudaError_t wgrad_sm80(cudaStream_t stream, const WgradArgs& args);

}  // namespace jgg

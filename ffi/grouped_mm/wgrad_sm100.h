// wgrad by the Blackwell kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/wgrad.h"

namespace jgg {

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> wgrad_sm100_unsupported(const WgradArgs& args, int compute_capability);

cudaError_t wgrad_sm100(cudaStream_t stream, const WgradArgs& args);

}  // namespace jgg

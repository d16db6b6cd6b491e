// wgrad by the Hopper kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/wgrad.h"

namespace jgg {

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> wgrad_sm90_unsupported(const WgradArgs& args, int compute_capability);

// Why there is no kernel as the plan says; nothing where there is.
std::optional<std::string> wgrad_sm90_plan_problem(const WgradArgs& args);

cudaError_t wgrad_sm90(cudaStream_t stream, const WgradArgs& args);

}  // namespace jgg

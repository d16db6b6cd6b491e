// mm by the Blackwell kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/mm.h"

namespace jgg {

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> mm_sm100_unsupported(const MmArgs& args, int compute_capability);

cudaError_t mm_sm100(cudaStream_t stream, const MmArgs& args);

}  // namespace jgg

// The sm80 kernel of mm: any GPU of compute capability 8.0 or newer that the build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/mm.h"

namespace jgg {

std::optional<std::string> mm_sm80_unsupported(const MmArgs& args, int compute_capability);
cudaError_t mm_sm80(cudaStream_t stream, const MmArgs& args);

}  // namespace jgg

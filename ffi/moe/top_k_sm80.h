// The kernel of top_k: any GPU of compute capability 8.0 or newer.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/top_k.h"

namespace jgg {

cudaError_t top_k_sm80(cudaStream_t stream, const TopKArgs& args);

}  // namespace jgg

// The kernels of route: any GPU of compute capability 8.0 or newer.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/route.h"

namespace jgg {

cudaError_t route_sm80(cudaStream_t stream, const RouteArgs& args);

}  // namespace jgg

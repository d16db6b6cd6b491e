// The Hopper kernel of a router of few tokens.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/router.h"

namespace jgg {

// w is bfloat16, or float32; (experts, d), or (d, experts). The launch shares out d.
cudaError_t LaunchRouterSm90(cudaStream_t stream, const RouterArgs& args, bool bfloat16_w,
                             bool transposed);

}  // namespace jgg

// The Hopper kernels of a few tokens' experts.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/few_tokens.h"

namespace jgg {

// `experts.w` is up in the first, down in the second, which has to follow the first: it begins
// before that has ended.
cudaError_t LaunchFewUpSm90(cudaStream_t stream, const FewTokens& experts, const Coding& coding);
cudaError_t LaunchFewDownSm90(cudaStream_t stream, const FewTokens& experts, const Coding& coding);

// Instances: ../quantized/format_sm90_instance.cu.
template <Mode kMode, int kBits>
cudaError_t LaunchFewUpInstanceSm90(cudaStream_t stream, const FewTokens& experts);
template <Mode kMode, int kBits>
cudaError_t LaunchFewDownInstanceSm90(cudaStream_t stream, const FewTokens& experts);

}  // namespace jgg

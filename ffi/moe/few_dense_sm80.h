// The kernels of a few tokens' experts with 16-bit weights, on every GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/few_dense.h"

namespace jgg {

// `w` is up in the first, down in the second, which has to follow the first: on Hopper it begins
// before that has ended. `kX`: the dtype of x, a and weights; `transposed`: K is their last axis.
template <DType kX>
cudaError_t LaunchFewDenseUpSm80(cudaStream_t stream, const FewDense& dense, bool transposed);
template <DType kX>
cudaError_t LaunchFewDenseDownSm80(cudaStream_t stream, const FewDense& dense, bool transposed);

}  // namespace jgg

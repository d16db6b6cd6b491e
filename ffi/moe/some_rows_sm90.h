// Launches of the kernels around the products of some tokens' experts, on Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/rows.h"
#include "moe/some_rows.h"

namespace jgg {

// The next kernel may begin before it has ended.
cudaError_t LaunchSomeRowsSm90(cudaStream_t stream, const SomeRows& rows);
// Combine, which begins before the kernel before has ended. Rows are bfloat16 or float16.
cudaError_t LaunchSumSomeRowsSm90(cudaStream_t stream, const CombineArgs& args);

}  // namespace jgg

// The kernels of dispatch and combine: any GPU of compute capability 8.0 or newer. Operands and
// results are 16-byte aligned.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/rows.h"
#include "moe/some_rows.h"

namespace jgg {

cudaError_t dispatch_sm80(cudaStream_t stream, const DispatchArgs& args);
cudaError_t combine_sm80(cudaStream_t stream, const CombineArgs& args);
// Route and dispatch in one.
cudaError_t some_rows_sm80(cudaStream_t stream, const SomeRows& rows);
cudaError_t combine_backward_sm80(cudaStream_t stream, const CombineBackwardArgs& args);

}  // namespace jgg

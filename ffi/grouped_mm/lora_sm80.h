// Host side of the kernel of products of low rank, on every GPU: launch.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/lora.h"

namespace jgg {

// `dtype` is that of x, both factors and the result. The launch sets `span`.
cudaError_t LaunchLoraSm80(cudaStream_t stream, DType dtype, Lora lora);

}  // namespace jgg

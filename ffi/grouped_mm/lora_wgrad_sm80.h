// Host side of the kernels of low rank's weight gradients, on every GPU: launch.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/lora_wgrad.h"

namespace jgg {

// `dtype` is that of every operand and result. The launch sets `parts`.
cudaError_t LaunchLoraWgradSm80(cudaStream_t stream, DType dtype, LoraWgrad lora);

}  // namespace jgg

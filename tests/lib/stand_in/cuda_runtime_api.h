// What declarations of launchers need of CUDA to be compiled for the host.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaErrorNoKernelImageForDevice = 209;

// Host side of the FP8 kernel of gemm_sm89.h: launch.
#pragma once

#include "fp8/device/gemm_sm89.cuh"
#include "fp8/gemm_sm89.h"
#include "grouped_mm/gemm_sm80.cuh"

namespace jgg {

template <bool kWgrad, bool kE5M2>
cudaError_t LaunchFp8GemmSm89Instance(cudaStream_t stream, const Fp8GemmSm89& fp8) {
  using Config = device::Fp8Sm89Config<kWgrad, kE5M2>;
  static_assert(kBytesSm80<Config> <= kLeastSharedMemory);
  static KnownBlocks known{};
  return LaunchOrdered<Config>(stream, device::Fp8GemmSm89Kernel<Config>, fp8.gemm, known,
                               [&](const GemmSm80& gemm) {
                                 Fp8GemmSm89 with = fp8;
                                 with.gemm = gemm;
                                 return device::MakePipelinedFp8<Config>(with);
                               });
}

}  // namespace jgg

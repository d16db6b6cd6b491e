// Host side of the kernels of a few tokens' experts: launch.
#pragma once

#include "grouped_mm/device/activation.cuh"
#include "moe/device/few_tokens_sm90.cuh"
#include "moe/few_tokens_sm90.h"

namespace jgg {
namespace device {

struct FewFinish {
  __device__ static float Load(const void* data, int64_t at, DType dtype) {
    return LoadFloat(data, at, dtype);
  }
  __device__ static void Store(void* data, int64_t at, DType dtype, float value) {
    StoreFloat(data, at, dtype, value);
  }
  template <bool kGated>
  __device__ static float Activate(Activation activation, float value, float other) {
    float values[1] = {value};
    if constexpr (kGated) {
      Gate<false, 1>(activation, values, &other);
    } else {
      device::Activate(activation, values);
    }
    return values[0];
  }
};

}  // namespace device

constexpr int kFewThreads = 32 * device::kDirectWarps;

template <Mode kMode, int kBits>
cudaError_t LaunchFewUpInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  using device::FewFinish, device::FewUpSm90Kernel;
  const dim3 blocks{static_cast<unsigned>(experts.f / 16),
                    static_cast<unsigned>(experts.tokens * experts.k)};
  if (IsGated(experts.activation)) {
    FewUpSm90Kernel<Weights, true, FewFinish><<<blocks, kFewThreads, 0, stream>>>(experts);
  } else {
    FewUpSm90Kernel<Weights, false, FewFinish><<<blocks, kFewThreads, 0, stream>>>(experts);
  }
  return cudaGetLastError();
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewDownInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  const dim3 blocks{static_cast<unsigned>(experts.d / 16), static_cast<unsigned>(experts.tokens)};
  device::FewDownSm90Kernel<Weights, device::FewFinish>
      <<<blocks, kFewThreads, 0, stream>>>(experts);
  return cudaGetLastError();
}

}  // namespace jgg

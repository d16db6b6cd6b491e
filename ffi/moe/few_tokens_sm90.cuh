// Host side of the kernels of a few tokens' experts: launch.
#pragma once

#include "common/launch_early.h"
#include "grouped_mm/device/activation.cuh"
#include "moe/device/few_tokens_sm90.cuh"
#include "moe/device/some_tokens_sm90.cuh"
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
static_assert(device::kSomeWarps == device::kDirectWarps);

// Whether pairs are more than the kernels of fewest tokens take.
inline bool MorePairs(const FewTokens& experts) {
  return experts.tokens * experts.k > rules::kMostFewPairs;
}

template <typename Weights, bool kGated>
cudaError_t LaunchFewUpOf(cudaStream_t stream, const FewTokens& experts) {
  using device::FewFinish, device::FewUpSm90Kernel, device::SomeUpSm90Kernel;
  const auto pairs = static_cast<unsigned>(experts.tokens * experts.k);
  const auto columns = static_cast<unsigned>(experts.f);
  if (MorePairs(experts)) {
    SomeUpSm90Kernel<Weights, kGated, FewFinish>
        <<<dim3(columns / 64, pairs), kFewThreads, 0, stream>>>(experts);
  } else {
    FewUpSm90Kernel<Weights, kGated, FewFinish>
        <<<dim3(columns / 16, pairs), kFewThreads, 0, stream>>>(experts);
  }
  return cudaGetLastError();
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewUpInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  return IsGated(experts.activation) ? LaunchFewUpOf<Weights, true>(stream, experts)
                                     : LaunchFewUpOf<Weights, false>(stream, experts);
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewDownInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  using device::FewDownSm90Kernel, device::FewFinish, device::SomeDownSm90Kernel;
  const auto tokens = static_cast<unsigned>(experts.tokens);
  const auto columns = static_cast<unsigned>(experts.d);
  if (MorePairs(experts)) {
    return LaunchEarly(SomeDownSm90Kernel<Weights, FewFinish>, dim3(columns / 32, tokens),
                       kFewThreads, stream, experts);
  }
  return LaunchEarly(FewDownSm90Kernel<Weights, FewFinish>, dim3(columns / 16, tokens), kFewThreads,
                     stream, experts);
}

}  // namespace jgg

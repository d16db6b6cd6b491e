// Host side of the kernels of a few tokens' experts: launch.
#pragma once

#include "common/launch_early.h"
#include "moe/device/few_tokens_sm90.cuh"
#include "moe/few_launch.cuh"
#include "moe/few_tokens_sm90.h"

namespace jgg {

// Whether pairs are more than blocks of the fewest are for.
inline bool MorePairs(const FewTokens& experts) {
  return experts.tokens * experts.k > rules::kFewestPairs;
}

template <typename Weights, bool kGated, typename Shape>
cudaError_t LaunchFewUpShape(cudaStream_t stream, const FewTokens& experts) {
  const auto kernel = device::FewUpSm90Kernel<Weights, kGated, Shape, device::FewFinish>;
  const int bytes = device::FewUpBytes<Shape, kGated ? 2 : 1>(experts);
  if (cudaError_t error = AllowBytes(kernel, bytes)) return error;
  const dim3 blocks(static_cast<unsigned>(experts.f / Shape::kColumns),
                    static_cast<unsigned>(experts.tokens * experts.k));
  kernel<<<blocks, Shape::kUpThreads, bytes, stream>>>(experts);
  return cudaGetLastError();
}

template <typename Weights, bool kGated>
cudaError_t LaunchFewUpOf(cudaStream_t stream, const FewTokens& experts) {
  using Shapes = device::FewShapes<Weights>;
  return MorePairs(experts)
             ? LaunchFewUpShape<Weights, kGated, typename Shapes::Up>(stream, experts)
             : LaunchFewUpShape<Weights, kGated, typename Shapes::FewestUp>(stream, experts);
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewUpInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  return IsGated(experts.activation) ? LaunchFewUpOf<Weights, true>(stream, experts)
                                     : LaunchFewUpOf<Weights, false>(stream, experts);
}

template <typename Weights, typename Shape>
cudaError_t LaunchFewDownShape(cudaStream_t stream, const FewTokens& experts) {
  const auto kernel = device::FewDownSm90Kernel<Weights, Shape, device::FewFinish>;
  const int bytes = device::FewDownBytes(experts);
  if (cudaError_t error = AllowBytes(kernel, bytes)) return error;
  const dim3 blocks(static_cast<unsigned>(experts.d / Shape::kColumns),
                    static_cast<unsigned>(experts.tokens));
  return LaunchEarly(kernel, blocks, Shape::kDownThreads, bytes, stream, experts);
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewDownInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  using Shapes = device::FewShapes<Weights>;
  return MorePairs(experts)
             ? LaunchFewDownShape<Weights, typename Shapes::Down>(stream, experts)
             : LaunchFewDownShape<Weights, typename Shapes::FewestDown>(stream, experts);
}

}  // namespace jgg

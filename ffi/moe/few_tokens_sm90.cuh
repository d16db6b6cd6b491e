// Host side of the kernels of a few tokens' experts: launch.
#pragma once

#include <algorithm>

#include "common/arch.h"
#include "common/launch_early.h"
#include "moe/device/few_grouped_down_sm90.cuh"
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

// How blocks share out `down`, and a block's shared memory: so many groups at most fit it.
template <typename Shape>
cudaError_t ShareOut(const FewTokens& experts, FewGroupedDown* down, int* bytes) {
  constexpr int kMostBytes = 225 << 10;  // static shared memory has a KiB
  const int64_t pairs = int64_t{experts.tokens} * experts.k;
  const int64_t strips_each = experts.d / device::kStrip;
  const int64_t chosen = std::min<int64_t>(pairs, experts.experts);
  const int64_t processors = Processors();
  if (processors == 0) return cudaErrorInvalidDevice;
  for (int shift = 3; shift >= 0; --shift) {
    const int64_t groups = chosen + ((pairs - chosen) >> shift);  // at most
    for (int64_t blocks = processors; blocks <= 8 * processors; blocks *= 2) {
      const int64_t strips = (groups * strips_each + blocks - 1) / blocks;
      const int64_t of_block = std::min(groups, 1 + (strips + strips_each - 2) / strips_each);
      if (of_block > rules::kMostFewGroups) continue;
      const int most = static_cast<int>(of_block);
      *bytes = device::GroupedDownBytes<Shape>(experts, most, shift);
      if (*bytes > kMostBytes) continue;
      *down = {experts,
               most,
               shift,
               Divisor::Of(blocks),
               Divisor::Of(strips_each),
               Divisor::Of(std::max(experts.f / 64, Shape::kAhead))};
      return cudaSuccess;
    }
  }
  return cudaErrorInvalidConfiguration;
}

template <typename Weights>
cudaError_t LaunchFewGroupedDown(cudaStream_t stream, const FewTokens& experts) {
  using Shape = device::GroupedDownShape<Weights>;
  const auto kernel = device::FewGroupedDownSm90Kernel<Weights, Shape, device::FewFinish>;
  FewGroupedDown down;
  int bytes = 0;
  if (cudaError_t error = ShareOut<Shape>(experts, &down, &bytes)) return error;
  if (cudaError_t error = AllowBytes(kernel, bytes)) return error;
  if (cudaError_t error =
          LaunchEarly(kernel, dim3(down.blocks.divisor), Shape::kThreads, bytes, stream, down)) {
    return error;
  }
  const dim3 blocks(
      static_cast<unsigned>((experts.d + device::kSumColumns - 1) / device::kSumColumns),
      static_cast<unsigned>(experts.tokens));
  return LaunchEarly(device::FewSumSm90Kernel<device::FewFinish>, blocks, device::kSumThreads, 0,
                     stream, experts);
}

template <Mode kMode, int kBits>
cudaError_t LaunchFewDownInstanceSm90(cudaStream_t stream, const FewTokens& experts) {
  using Weights = device::PackedTiles<kMode, kBits>;
  using Shapes = device::FewShapes<Weights>;
  if (rules::FewDownByGroups(int64_t{experts.tokens} * experts.k, experts.experts,
                             int64_t{experts.d} * experts.f)) {
    return LaunchFewGroupedDown<Weights>(stream, experts);
  }
  return MorePairs(experts)
             ? LaunchFewDownShape<Weights, typename Shapes::Down>(stream, experts)
             : LaunchFewDownShape<Weights, typename Shapes::FewestDown>(stream, experts);
}

}  // namespace jgg

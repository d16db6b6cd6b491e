// The experts of a few tokens: few_tokens.h. Both kernels are DirectProducts, a block for 16
// columns.
//
// up: a block has a pair of token and expert, and up to seven later pairs of that expert. The block
// of a pair that an earlier block has ends at once. There are at most 32 pairs, so every warp finds
// its pairs by comparing all of them.
//
// down: a block has a token. Its pairs are the rows of one product, and each row meets the codes of
// its own expert: the instruction multiplies zeros for the other rows, and sums of pairs lie side
// by side. The block adds these with their weights in the order of the token's choices, so no other
// kernel has to. Blocks begin as soon as those of `up` leave them room, and ask for their first
// weights before they wait for what `up` writes.
#pragma once

#include <cstdint>

#include "moe/few_tokens.h"
#include "moe/rules.h"
#include "quantized/device/direct_product_sm90.cuh"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

// The expert, or -1 if it is not here.
__device__ inline int LocalExpert(const FewTokens& experts, int pair) {
  const uint32_t first = experts.expert_offset == nullptr ? 0 : *experts.expert_offset;
  const uint32_t local = static_cast<uint32_t>(experts.expert_index[pair]) - first;
  return local < static_cast<uint32_t>(experts.experts) ? static_cast<int>(local) : -1;
}

// The place of set bit number `number`.
__device__ inline int PlaceOfBit(uint32_t bits, int number) {
  for (int i = 0; i < number; ++i) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// The pairs that a block of `up` has, a bit of `pairs` for each. A warp finds them.
struct FewPairs {
  int expert;      // -1: none
  uint32_t pairs;  // of that expert, from the block's own on, if the block is the one that has them

  __device__ FewPairs(const FewTokens& experts, int own) : expert(LocalExpert(experts, own)) {
    static_assert(rules::kMostFewPairs == 32);
    const int pair = threadIdx.x % 32, count = experts.tokens * experts.k;
    const uint32_t all = __ballot_sync(~0u, pair < count && LocalExpert(experts, pair) == expert);
    const uint32_t earlier = all & ((1u << own) - 1);
    pairs = expert < 0 || __popc(earlier) % 8 != 0 ? 0 : all ^ earlier;
  }

  __device__ int Count() const { return min(__popc(pairs), 8); }
  __device__ int Pair(int row) const { return PlaceOfBit(pairs, row); }
};

// The sums of a weight's column `column`, in the units of values, with the bias.
template <typename Finish>
__device__ float WithBias(const FewTokensWeight& w, int expert, int columns, int column,
                          float sum) {
  if (w.global_scale.data != nullptr) sum *= w.global_scale.At(expert, column);
  if (w.bias != nullptr) {
    const int64_t at = static_cast<int64_t>(expert) * columns + column;
    sum += Finish::Load(w.bias, at, w.bias_dtype);
  }
  return sum;
}

__device__ inline float RoundedToBFloat16(float value) {
  return Half<DType::kBF16>(Round2<DType::kBF16>(value, value), 0);
}

// Finish: loads, stores and activations. The host has other code for these.
template <typename Weights, bool kGated, typename Finish>
__global__ void __launch_bounds__(32 * kDirectWarps, 3)
    FewUpSm90Kernel(const __grid_constant__ FewTokens experts) {
  constexpr int kBlocks = kGated ? 2 : 1;
  using Product = DirectProduct<Weights, kBlocks>;
  __shared__ typename Product::SharedMemory memory;
  __shared__ int pair_of[8];
  AllowNextKernel();
  const FewTokensWeight& w = experts.w;
  const FewPairs pairs(experts, blockIdx.y);
  const int count = pairs.Count(), k_tiles = w.packed.k_tiles;
  const int thread = threadIdx.x, lane = thread % 32;
  if (count == 0) return;
  if (thread < count) pair_of[thread] = pairs.Pair(thread);
  PackedColumn columns[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    columns[b] =
        Weights::ColumnOf(w.packed, w.scales, pairs.expert, blockIdx.x / 4 + b * (experts.f / 64));
  }
  // The rows of x that this lane copies.
  const char* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 4 + lane / 8;
    const int64_t token = row < count ? pairs.Pair(row) / experts.k : 0;
    rows[half] = row < count ? experts.x + token * k_tiles * 128 : nullptr;
  }
  Product::Multiply(
      memory, Weights::TileScales(w.packed), k_tiles, [](int tile) { return tile; },
      [&](int, int b) { return columns[b]; },
      [&](int tile, int row) -> const char* {
        if (row < 0) return experts.x;
        const char* line = rows[row / 4];
        return line == nullptr ? nullptr : line + tile * 128;
      });
  __syncthreads();
  const int row = Product::Row(), column = 16 * blockIdx.x + Product::Column();
  if (thread >= 128 || row >= count) return;
  float values[2] = {0.0f, 0.0f};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float sum = Product::Sum(memory, b);
    values[b] = RoundedToBFloat16(
        WithBias<Finish>(w, pairs.expert, kBlocks * experts.f, column + b * experts.f, sum));
  }
  const float a = Finish::template Activate<kGated>(experts.activation, values[0], values[1]);
  const int64_t at = static_cast<int64_t>(pair_of[row]) * experts.f + column;
  Finish::Store(experts.a, at, DType::kBF16, a);
}

template <typename Weights, typename Finish>
__global__ void __launch_bounds__(32 * kDirectWarps, 3)
    FewDownSm90Kernel(const __grid_constant__ FewTokens experts) {
  using Product = DirectProduct<Weights, 1>;
  constexpr int kMost = rules::kMostFewChoices, kColumns = 16;
  __shared__ typename Product::SharedMemory memory;
  __shared__ int experts_of[kDirectWarps][kMost], pairs_of[kDirectWarps][kMost];
  __shared__ float terms[kColumns][kMost + 1];
  const FewTokensWeight& w = experts.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k_tiles = w.packed.k_tiles;
  const int token = blockIdx.y, own_pair = token * experts.k + lane;
  // The token's pairs that exist, for each warp.
  const int own = lane < experts.k ? LocalExpert(experts, own_pair) : -1;
  const uint32_t exist = __ballot_sync(~0u, own >= 0);
  const int count = __popc(exist);
  if (own >= 0) {
    const int place = __popc(exist & ((1u << lane) - 1));
    experts_of[warp][place] = own;
    pairs_of[warp][place] = own_pair;
  }
  __syncwarp();
  // Tiles come pair by pair. They are few, so a division is exact in float32.
  const float per_tile = 1.0f / static_cast<float>(k_tiles);
  const auto row_of = [&](int at) {
    return static_cast<int>((static_cast<float>(at) + 0.5f) * per_tile);
  };
  Product::Multiply(
      memory, Weights::TileScales(w.packed), count * k_tiles,
      [&](int at) { return at - row_of(at) * k_tiles; },
      [&](int at, int) {
        return Weights::ColumnOf(w.packed, w.scales, experts_of[warp][row_of(at)], blockIdx.x / 4);
      },
      [&](int at, int row) -> const char* {
        if (row < 0) return experts.a;
        if (row != row_of(at)) return nullptr;
        // `at` counts the tiles of the rows before.
        const int64_t line = static_cast<int64_t>(pairs_of[warp][row] - row) * k_tiles + at;
        return experts.a + line * 128;
      },
      [] { WaitForPreviousKernel(); });
  __syncthreads();
  const int row = Product::Row(), column = Product::Column();
  if (threadIdx.x < 128 && row < count) {
    const float y = WithBias<Finish>(w, experts_of[warp][row], experts.d,
                                     kColumns * blockIdx.x + column, Product::Sum(memory, 0));
    terms[column][row] = y * experts.expert_weight[pairs_of[warp][row]];
  }
  __syncthreads();
  if (threadIdx.x >= kColumns) return;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += terms[threadIdx.x][i];
  const int64_t at = static_cast<int64_t>(token) * experts.d + kColumns * blockIdx.x + threadIdx.x;
  Finish::Store(experts.out, at, experts.out_dtype, sum);
}

}  // namespace jgg::device

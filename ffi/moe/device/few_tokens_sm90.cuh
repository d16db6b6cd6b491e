// The experts of a few tokens: few_tokens.h. What takes time there is instructions and latency, so
// a warp asks for the words of several tiles at once, and a block copies only rows that it has.
// Both kernels have two shapes, one for the fewest pairs, whose sums over k more warps share.
//
// up: a block has kQuarters x 16 columns, and up to eight pairs of an expert: that of a pair, and
// later ones. The block of a pair that an earlier block has ends at once. There are at most 64
// pairs, so every warp finds its pairs by comparing all of them.
//
// down: a block has a token and 16 columns. A warp has one of the token's pairs; all eight columns
// of the instruction's result are that pair's. The block adds pairs with their
// weights in the order of the token's choices, so no other kernel has to. Blocks begin as soon as
// those of `up` leave them room, and ask for their first weights before they wait for what `up`
// writes. Where many pairs share experts, few_grouped_down_sm90.cuh has another one.
#pragma once

#include <cstdint>

#include "moe/device/few_factors.cuh"
#include "moe/device/few_pairs.cuh"
#include "moe/few_tokens.h"
#include "moe/rules.h"
#include "quantized/device/instructions.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

// The shape of a block: quarters of a tile's 64 columns, warps that share out tiles of k (in `down`
// of each pair), and blocks of a processor; tiles of which a warp has the words.
template <int kQuarters_, int kSplits_, int kBlocks_, int kAhead_>
struct FewShape {
  static constexpr int kQuarters = kQuarters_, kSplits = kSplits_, kBlocks = kBlocks_;
  static constexpr int kAhead = kAhead_, kColumns = 16 * kQuarters;
  static constexpr int kUpThreads = 32 * kQuarters * kSplits;
  static constexpr int kDownThreads = 32 * rules::kMostFewChoices * kSplits;
};
// Of the fewest pairs, and of more. Codes of 2 and 4 bits take few registers.
template <typename Weights, int kBits = Weights::kTileCodes / 512,
          bool kNarrow = kBits == 2 || kBits == 4>
struct FewShapes {
  using FewestUp = FewShape<1, 8, kNarrow ? 3 : 2, 2>;
  using Up = FewShape<4, 1, kNarrow ? 5 : 4, kNarrow ? 3 : 2>;
  using FewestDown = FewShape<1, 2, kNarrow ? 2 : 1, 2>;
  using Down = FewShape<1, 1, kNarrow ? 4 : 2, 2>;
};
constexpr int kFewDownPairs = rules::kMostFewChoices;

// For PackedTiles::Reader: the number in a warpgroup of a thread, of which a warp has a quarter.
template <int kQuarters>
struct QuarterOfWarp {
  __device__ static int Get() {
    return (blockIdx.x * kQuarters + threadIdx.x / 32 % kQuarters) % 4 * 32 + threadIdx.x % 32;
  }
};

// Bytes of dynamic shared memory: rows of x, then sums.
template <typename Shape, int kBlocks>
JGG_HOST_DEVICE int FewUpBytes(const FewTokens& experts) {
  const int x = FewRowsOfX(experts) * experts.d * 2;
  const int sums = kBlocks * Shape::kQuarters * Shape::kSplits * 32 * 16;
  return x < sums ? sums : x;
}

// Finish: loads, stores and activations. The host has other code for these.
template <typename Weights, bool kGated, typename Shape, typename Finish>
__global__ void __launch_bounds__(Shape::kUpThreads, Shape::kBlocks)
    FewUpSm90Kernel(const __grid_constant__ FewTokens experts) {
  constexpr int kBlocks = kGated ? 2 : 1, kSplits = Shape::kSplits, kQuarters = Shape::kQuarters;
  constexpr int kThreads = Shape::kUpThreads, kColumns = Shape::kColumns;
  using Reader = typename Weights::template Reader<1, QuarterOfWarp<kQuarters>>;
  using Words = typename Reader::Words;
  constexpr int kAhead = Shape::kAhead;
  __shared__ int pair_of[8];
  AllowNextKernel();
  const FewTokensWeight& w = experts.w;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int split = warp / kQuarters;
  const FewPairs pairs(experts, blockIdx.y, pair_of);
  if (pairs.count == 0) return;
  const int k_tiles = w.packed.k_tiles;
  const Reader reader(Weights::TileScales(w.packed));
  PackedColumn columns[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    columns[b] = Weights::ColumnOf(w.packed, w.scales, pairs.expert,
                                   blockIdx.x * kQuarters / 4 + b * (experts.f / 64));
  }
  Words words[kAhead][kBlocks];
  const auto load = [&](int i, int tile) {
    if (tile >= k_tiles) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      words[i][b] =
          reader.template Load<true, ScaleRange::kAny>(columns[b].codes, columns[b].scales, tile);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, split + i * kSplits);
  __syncthreads();
  // Lines of 128 bytes, tile by tile and row by row, whose pieces are swizzled by the row.
  char* const x = DynamicMemory();
  const int kept = FewRowsOfX(experts);
  const bool by_token = experts.tokens <= 8;
  for (int row = warp; row < pairs.count; row += kQuarters * kSplits) {
    const int token = pair_of[row] / experts.k, place = by_token ? token : row;
    if (by_token && row > 0 && pair_of[row - 1] / experts.k == token) continue;  // it is there
    const char* const line = experts.x + static_cast<int64_t>(token) * k_tiles * 128;
    for (int i = lane; i < k_tiles * 8; i += 32) {
      CopyPiece(line + i * 16, x + (i / 8 * kept + place) * 128 + (i % 8 ^ place) * 16, 16);
    }
  }
  // Of this thread's results: their column, and what becomes of sums there.
  const int column = thread % kColumns;
  const int place_of_column = static_cast<int>(blockIdx.x) * kColumns + column;
  const FewFactors<Weights, Finish> factors(w, pairs.expert, kBlocks * experts.f, place_of_column);
  const FewFactors<Weights, Finish> others(w, pairs.expert, kBlocks * experts.f,
                                           place_of_column + (kBlocks - 1) * experts.f);
  WaitCopied();
  __syncthreads();
  const int own_row = min(lane % 8, pairs.count - 1);
  const int place = by_token ? pair_of[own_row] / experts.k : own_row;
  const char* const row = x + place * 128;
  float sums[kBlocks][2][4] = {};
#pragma unroll 1
  for (int first = split; first < k_tiles; first += kSplits * kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int tile = first + i * kSplits;
      if (tile >= k_tiles) break;
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 32 k
        uint32_t of_x[4];
        LoadMatrices(row + tile * kept * 128 + ((part * 4 + lane / 8) ^ place) * 16, of_x);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[8];
          reader.template Read<2, true, ScaleRange::kAny>(words[i][b], 0, 2 * part, a);
          MultiplyWarp(a, of_x[0], of_x[1], sums[b][0]);
          MultiplyWarp(a + 4, of_x[2], of_x[3], sums[b][1]);
        }
      }
      load(i, tile + kSplits * kAhead);
    }
  }
  __syncthreads();  // x has been read
  float4* const partial = reinterpret_cast<float4*>(x);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto& one = sums[b][0];
    const auto& other = sums[b][1];
    partial[b * kThreads + thread] =
        make_float4(one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]);
  }
  __syncthreads();
  const float* const all = reinterpret_cast<const float*>(x);
  for (int r = thread / kColumns; r < pairs.count; r += kThreads / kColumns) {
    // Where a warp has the sum of the row and the column of its 16.
    const int at = column / 16 * 128 + column % 8 * 16 + r / 2 * 4 + column % 16 / 8 * 2 + r % 2;
    float values[2] = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSplits; ++s) sum += all[(b * kSplits + s) * kQuarters * 128 + at];
      values[b] = RoundedToBFloat16((b == 0 ? factors : others).Of(sum));
    }
    const float a = Finish::template Activate<kGated>(experts.activation, values[0], values[1]);
    const int64_t to = static_cast<int64_t>(pair_of[r]) * experts.f + place_of_column;
    Finish::Store(experts.a, to, DType::kBF16, a);
  }
}

// Bytes of dynamic shared memory of `down`: rows of a.
inline int FewDownBytes(const FewTokens& experts) { return experts.k * experts.f * 2; }

template <typename Weights, typename Shape, typename Finish>
__global__ void __launch_bounds__(Shape::kDownThreads, Shape::kBlocks)
    FewDownSm90Kernel(const __grid_constant__ FewTokens experts) {
  constexpr int kColumns = Shape::kColumns, kAhead = Shape::kAhead, kSplits = Shape::kSplits;
  static_assert(Shape::kQuarters == 1);
  using Reader = typename Weights::template Reader<1, QuarterOfWarp<1>>;
  __shared__ float partial[kSplits][kFewDownPairs][kColumns];
  __shared__ float terms[kColumns][kFewDownPairs + 1];
  const FewTokensWeight& w = experts.w;
  const int thread = threadIdx.x, lane = thread % 32, k_tiles = w.packed.k_tiles;
  const int number = thread / 32 % kFewDownPairs, split = thread / 32 / kFewDownPairs;
  const int token = blockIdx.y;
  // Those of the token's pairs that exist, in order.
  const int own = lane < experts.k ? LocalExpert(experts, token * experts.k + lane) : -1;
  const uint32_t exist = __ballot_sync(~0u, own >= 0);
  const int count = __popc(exist);
  const auto choice_of = [&](int which) {  // by the whole warp
    const bool is_it = own >= 0 && __popc(exist & ((1u << lane) - 1)) == which;
    return max(__ffs(__ballot_sync(~0u, is_it)) - 1, 0);
  };
  const int choice = choice_of(number), expert = __shfl_sync(~0u, own, choice);
  const bool there = number < count;
  const Reader reader(Weights::TileScales(w.packed));
  const PackedColumn column =
      Weights::ColumnOf(w.packed, w.scales, max(expert, 0), static_cast<int>(blockIdx.x) / 4);
  typename Reader::Words words[kAhead];
  const auto load = [&](int i, int tile) {
    if (tile >= k_tiles) return;
    words[i] = reader.template Load<true, ScaleRange::kAny>(column.codes, column.scales, tile);
  };
  if (there) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, split + i * kSplits);
  }
  // Each of the first threads has the sum of a pair and a column, and what becomes of it.
  const int of_column = thread % kColumns, of_pair = thread / kColumns;
  const int place_of_column = static_cast<int>(blockIdx.x) * kColumns + of_column;
  float factor = 0.0f, added = 0.0f;
#pragma unroll
  for (int i = 0; i < 32 / kColumns; ++i) {  // pairs of a warp's threads
    const int which = thread / 32 * (32 / kColumns) + i, found = choice_of(which);
    const int found_expert = __shfl_sync(~0u, own, found);
    if (which != of_pair || which >= count) continue;
    const FewFactors<Weights, Finish> of(w, found_expert, experts.d, place_of_column);
    const float weight = experts.expert_weight[token * experts.k + found];
    factor = of.scale * weight;
    added = of.bias * weight;
  }
  WaitForPreviousKernel();
  if (there) {
    // The tiles of a row that this warp multiplies.
    char* const row = DynamicMemory() + number * k_tiles * 128;
    const int64_t pair = static_cast<int64_t>(token) * experts.k + choice;
    for (int i = lane; i < (k_tiles - split + kSplits - 1) / kSplits * 8; i += 32) {
      const int piece = (split + i / 8 * kSplits) * 8 + i % 8;
      CopyPiece(experts.a + (pair * k_tiles * 8 + piece) * 16, row + piece * 16, 16);
    }
    WaitCopied();
    __syncwarp();
    float sums[2][4] = {};
#pragma unroll 1
    for (int first = split; first < k_tiles; first += kSplits * kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int tile = first + i * kSplits;
        if (tile >= k_tiles) break;
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // 32 k
          uint32_t a[8], of_row[4];
          LoadMatrices(row + (tile * 8 + part * 4 + lane / 8) * 16, of_row);
          reader.template Read<2, true, ScaleRange::kAny>(words[i], 0, 2 * part, a);
          MultiplyWarp(a, of_row[0], of_row[1], sums[0]);
          MultiplyWarp(a + 4, of_row[2], of_row[3], sums[1]);
        }
        load(i, tile + kSplits * kAhead);
      }
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        partial[split][number][i * 8 + lane / 4] = sums[0][2 * i] + sums[1][2 * i];
      }
    }
  }
  __syncthreads();
  if (of_pair < count) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) sum += partial[s][of_pair][of_column];
    terms[of_column][of_pair] = sum * factor + added;
  }
  __syncthreads();
  if (thread >= kColumns) return;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += terms[thread][i];
  Finish::Store(experts.out, static_cast<int64_t>(token) * experts.d + place_of_column,
                experts.out_dtype, sum);
}

}  // namespace jgg::device

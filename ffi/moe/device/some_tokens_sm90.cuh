// The experts of more tokens than few_tokens_sm90.cuh is for: up to 64 pairs, few_tokens.h. There
// most instructions copied rows of x, once for each 16 columns, and found pairs. Here a warp goes
// through many tiles, with the words of the next two under way, and rows of x stay.
//
// up: a block has 64 columns, and up to eight pairs of an expert. Four warps share out the columns,
// and two of them a quarter's tiles of k.
//
// down: a block has a token and 32 columns, and a warp one of its pairs. All eight columns of the
// instruction's result are that pair's.
#pragma once

#include <cstdint>

#include "moe/device/few_tokens_sm90.cuh"

namespace jgg::device {

constexpr int kSomeWarps = 8;
constexpr int kSomeAhead = 2;  // tiles of which a warp has the words

// Blocks of a multiprocessor, as many as their registers allow.
template <typename Weights>
constexpr int kSomeBlocks = Weights::kTileCodes <= 2048 ? 3 : 2;

// The pairs that a block of `up` has.
struct SomePairs {
  int expert, count;  // count 0: another block has them

  // pair_of: shared memory of 8 places. The block meets before it reads them.
  __device__ SomePairs(const FewTokens& experts, int own, int* pair_of)
      : expert(LocalExpert(experts, own)) {
    static_assert(rules::kMostSomePairs == 64);
    const int lane = threadIdx.x % 32, pairs = experts.tokens * experts.k;
    const bool low = lane < pairs && LocalExpert(experts, lane) == expert;
    const bool high = lane + 32 < pairs && LocalExpert(experts, lane + 32) == expert;
    const uint64_t all =
        uint64_t{__ballot_sync(~0u, high)} << 32 | uint64_t{__ballot_sync(~0u, low)};
    const uint64_t later = ~uint64_t{0} << own, mine = all & later;
    const bool first = CountOf(all & ~later) % 8 == 0;
    count = expert < 0 || !first ? 0 : min(CountOf(mine), 8);
    const int pair = threadIdx.x;
    if (pair >= 64 || (mine >> pair & 1) == 0) return;
    const int row = CountOf(mine & ((uint64_t{1} << pair) - 1));
    if (row < count) pair_of[row] = pair;
  }

 private:
  __device__ static int CountOf(uint64_t bits) {
    return __popc(static_cast<uint32_t>(bits)) + __popc(static_cast<uint32_t>(bits >> 32));
  }
};

template <typename Weights, bool kGated, typename Finish>
__global__ void __launch_bounds__(32 * kSomeWarps, kSomeBlocks<Weights>)
    SomeUpSm90Kernel(const __grid_constant__ FewTokens experts) {
  constexpr int kBlocks = kGated ? 2 : 1, kMostTiles = rules::kMostSomeWidth / 64;
  using Reader = typename Weights::template Reader<1>;
  // Rows of x, tile by tile, in lines of 128 bytes whose pieces are swizzled by the line; then
  // sums.
  __shared__ uint4 memory[kMostTiles * 64];
  __shared__ int pair_of[8];
  static_assert(sizeof(memory) >= kBlocks * kSomeWarps * 32 * sizeof(float4));
  AllowNextKernel();
  const FewTokensWeight& w = experts.w;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, half = warp / 4;
  const SomePairs pairs(experts, blockIdx.y, pair_of);
  if (pairs.count == 0) return;
  const int k_tiles = w.packed.k_tiles;
  const Reader reader(Weights::TileScales(w.packed));
  PackedColumn columns[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    columns[b] =
        Weights::ColumnOf(w.packed, w.scales, pairs.expert, blockIdx.x + b * (experts.f / 64));
  }
  typename Reader::Words words[kSomeAhead][kBlocks];
  const auto load = [&](int i, int tile) {
    if (tile >= k_tiles) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      words[i][b] =
          reader.template Load<true, ScaleRange::kAny>(columns[b].codes, columns[b].scales, tile);
    }
  };
#pragma unroll
  for (int i = 0; i < kSomeAhead; ++i) load(i, half + 2 * i);
  __syncthreads();
  char* const x = reinterpret_cast<char*>(memory);
  const bool there = warp < pairs.count;  // a warp copies a row
  const int64_t token = there ? pair_of[warp] / experts.k : 0;
  const char* const line = experts.x + token * k_tiles * 128;
  for (int i = lane; i < k_tiles * 8; i += 32) {
    CopyPiece(line + i * 16, x + i / 8 * 1024 + warp * 128 + (i % 8 ^ warp) * 16, there ? 16 : 0);
  }
  WaitCopied();
  __syncthreads();
  float sums[kBlocks][2][4] = {};
#pragma unroll 1
  for (int first = half; first < k_tiles; first += 2 * kSomeAhead) {
#pragma unroll
    for (int i = 0; i < kSomeAhead; ++i) {
      const int tile = first + 2 * i;
      if (tile >= k_tiles) break;
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 32 k
        const int row = lane % 8, piece = part * 4 + lane / 8;
        uint32_t of_x[4];
        LoadMatrices(x + tile * 1024 + row * 128 + (piece ^ row) * 16, of_x);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[8];
          reader.template Read<2, true, ScaleRange::kAny>(words[i][b], 0, 2 * part, a);
          MultiplyWarp(a, of_x[0], of_x[1], sums[b][0]);
          MultiplyWarp(a + 4, of_x[2], of_x[3], sums[b][1]);
        }
      }
      load(i, tile + 2 * kSomeAhead);
    }
  }
  __syncthreads();  // x has been read
  float4* const partial = reinterpret_cast<float4*>(memory);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto& one = sums[b][0];
    const auto& other = sums[b][1];
    partial[(b * kSomeWarps + warp) * 32 + lane] =
        make_float4(one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]);
  }
  __syncthreads();
  const float* const all = reinterpret_cast<const float*>(memory);
#pragma unroll
  for (int i = thread; i < 512; i += 32 * kSomeWarps) {
    // As in DirectProduct: which row and column of a quarter number i % 128 is.
    const int row = i / 4 % 4 * 2 + i % 2;
    const int column = 64 * blockIdx.x + i / 128 * 16 + i % 128 / 16 + i % 4 / 2 * 8;
    if (row >= pairs.count) continue;
    float values[2] = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float sum = all[b * kSomeWarps * 128 + i] + all[b * kSomeWarps * 128 + 512 + i];
      values[b] = RoundedToBFloat16(WithBias<Finish>(
          w, pairs.expert, kBlocks * experts.f, column + b * experts.f, sum * Weights::kFactor));
    }
    const float a = Finish::template Activate<kGated>(experts.activation, values[0], values[1]);
    const int64_t at = static_cast<int64_t>(pair_of[row]) * experts.f + column;
    Finish::Store(experts.a, at, DType::kBF16, a);
  }
}

// For PackedTiles::Reader: the warps of a block all have the same 16 of a tile's 64 columns.
template <int kQuarter>
struct SomeThread {
  __device__ static int Get() { return blockIdx.x % 2 * 64 + kQuarter * 32 + threadIdx.x % 32; }
};

template <typename Weights, typename Finish>
__global__ void __launch_bounds__(32 * kSomeWarps, kSomeBlocks<Weights>)
    SomeDownSm90Kernel(const __grid_constant__ FewTokens experts) {
  constexpr int kMost = rules::kMostFewChoices, kColumns = 32;
  constexpr int kMostTiles = rules::kMostSomeWidth / 64;
  static_assert(kMost == kSomeWarps);
  using Low = typename Weights::template Reader<1, SomeThread<0>>;
  using High = typename Weights::template Reader<1, SomeThread<1>>;
  __shared__ uint4 rows[kSomeWarps][kMostTiles * 8];  // of a, one for each warp
  __shared__ float terms[kColumns][kMost + 1];
  const FewTokensWeight& w = experts.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k_tiles = w.packed.k_tiles;
  const int token = blockIdx.y;
  // The warp's pair: number `warp` of those that exist.
  const int own = lane < experts.k ? LocalExpert(experts, token * experts.k + lane) : -1;
  const uint32_t exist = __ballot_sync(~0u, own >= 0);
  const bool is_it = own >= 0 && __popc(exist & ((1u << lane) - 1)) == warp;
  const int count = __popc(exist), place = max(__ffs(__ballot_sync(~0u, is_it)) - 1, 0);
  const int expert = __shfl_sync(~0u, own, place), pair = token * experts.k + place;
  if (warp < count) {
    const int tile_scales = Weights::TileScales(w.packed);
    const Low low(tile_scales);
    const High high(tile_scales);
    const PackedColumn column =
        Weights::ColumnOf(w.packed, w.scales, expert, static_cast<int>(blockIdx.x) / 2);
    typename Low::Words words[kSomeAhead];
    typename High::Words more[kSomeAhead];
    const auto load = [&](int i, int tile) {
      if (tile >= k_tiles) return;
      words[i] = low.template Load<true, ScaleRange::kAny>(column.codes, column.scales, tile);
      more[i] = high.template Load<true, ScaleRange::kAny>(column.codes, column.scales, tile);
    };
#pragma unroll
    for (int i = 0; i < kSomeAhead; ++i) load(i, i);
    WaitForPreviousKernel();
    char* const row = reinterpret_cast<char*>(rows[warp]);
    for (int i = lane; i < k_tiles * 8; i += 32) {
      CopyPiece(experts.a + (static_cast<int64_t>(pair) * k_tiles * 8 + i) * 16, row + i * 16, 16);
    }
    WaitCopied();
    __syncwarp();
    float sums[2][4] = {};
#pragma unroll 1
    for (int first = 0; first < k_tiles; first += kSomeAhead) {
#pragma unroll
      for (int i = 0; i < kSomeAhead; ++i) {
        if (first + i >= k_tiles) break;
        const uint32_t* const of_row =
            reinterpret_cast<const uint32_t*>(row + (first + i) * 128) + lane % 4;
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // 32 k
          const uint32_t b[4] = {of_row[16 * part], of_row[16 * part + 4], of_row[16 * part + 8],
                                 of_row[16 * part + 12]};
          uint32_t a[8];
          low.template Read<2, true, ScaleRange::kAny>(words[i], 0, 2 * part, a);
          MultiplyWarp(a, b[0], b[1], sums[0]);
          MultiplyWarp(a + 4, b[2], b[3], sums[0]);
          high.template Read<2, true, ScaleRange::kAny>(more[i], 0, 2 * part, a);
          MultiplyWarp(a, b[0], b[1], sums[1]);
          MultiplyWarp(a + 4, b[2], b[3], sums[1]);
        }
        load(i, first + i + kSomeAhead);
      }
    }
    if (lane % 4 == 0) {
      const float weight = experts.expert_weight[pair];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = i / 2 * 16 + i % 2 * 8 + lane / 4;
        const float y =
            WithBias<Finish>(w, expert, experts.d, kColumns * static_cast<int>(blockIdx.x) + at,
                             sums[i / 2][i % 2 * 2] * Weights::kFactor);
        terms[at][warp] = y * weight;
      }
    }
  } else {
    WaitForPreviousKernel();
  }
  __syncthreads();
  if (threadIdx.x >= kColumns) return;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += terms[threadIdx.x][i];
  const int64_t at = static_cast<int64_t>(token) * experts.d + kColumns * blockIdx.x + threadIdx.x;
  Finish::Store(experts.out, at, experts.out_dtype, sum);
}

}  // namespace jgg::device

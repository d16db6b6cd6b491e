// `down` of a few tokens' experts (few_tokens.h), where several pairs meet an expert: its weights
// are decoded once for all of them. All blocks run at one time, each with as much of the weights.
//
// A group is an expert and up to eight of its pairs, or fewer where rows are long; a strip is 32
// columns of a group. Blocks share out strips, and the warps of a block the tiles of k of these
// strips, one after the other. A warp asks for the words of a later tile as soon as it has decoded
// one, also where that is another group's, so memory does not wait for the end of a strip. Where
// the k of a strip is that of several warps, the one that began it adds up their sums.
//
// The kernel writes what each pair adds, in float32, and FewSumSm90Kernel adds that in the order of
// a token's choices. Sums have one order for each list of experts.
#pragma once

#include <cstdint>

#include "moe/device/few_factors.cuh"
#include "moe/device/few_pairs.cuh"
#include "moe/few_grouped_down.h"
#include "moe/rules.h"
#include "quantized/device/instructions.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

constexpr int kStrip = 32, kHalves = 2;       // columns, of which an instruction has 16
constexpr int kStripSums = kHalves * 32 * 4;  // of a strip and eight rows
constexpr int kMostFewGroups = rules::kMostFewGroups;

// Warps of a block, and tiles of which a warp has the words. Codes of many bits take more
// registers.
template <typename Weights, bool kNarrow = (Weights::kTileCodes <= 2048)>
struct GroupedDownShape {
  static constexpr int kWarps = kNarrow ? 24 : 16, kAhead = 2, kThreads = 32 * kWarps;
};

struct FewGroup {
  int expert, count, first;  // pairs, and how many of the expert's are in earlier groups
  int pair_of[8];
};

// Strips of a block, and the group of its first one.
struct FewPart {
  int first, count, first_group;
};

__device__ inline int Quotient(int n, const Divisor& of) {
#ifdef __CUDA_ARCH__
  const uint32_t quotient = __umulhi(static_cast<uint32_t>(n), of.inverse);
#else
  const auto quotient =
      static_cast<uint32_t>(uint64_t{static_cast<uint32_t>(n)} * of.inverse >> 32);
#endif
  return of.divisor == 1 ? n : static_cast<int>(quotient);
}

// Finds a block's strips and groups. `memory` has room for an int of each expert and pair.
template <int kThreads>
__device__ FewPart FindPart(const FewGroupedDown& down, int* memory,
                            FewGroup (&groups)[kMostFewGroups], int& all_groups) {
  const FewTokens& experts = down.experts;
  const int thread = threadIdx.x, lane = thread % 32, pairs = experts.tokens * experts.k;
  const int shift = down.rows_shift, most = (1 << shift) - 1;
  int* const counts = memory;
  int* const expert_of = memory + experts.experts;
  const int own = thread < pairs ? LocalExpert(experts, thread) : -1;
  for (int i = thread; i < experts.experts; i += kThreads) counts[i] = 0;
  if (thread == 0) all_groups = 0;
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const int expert = pair == thread ? own : LocalExpert(experts, pair);
    expert_of[pair] = expert;
    if (expert >= 0 && (atomicAdd(&counts[expert], 1) & most) == 0) atomicAdd(&all_groups, 1);
  }
  __syncthreads();
  // The first blocks have one strip more.
  const int strips_each = static_cast<int>(down.strips_each.divisor), block = blockIdx.x;
  const int all = all_groups * strips_each, each = Quotient(all, down.blocks);
  const int rest = all - each * static_cast<int>(down.blocks.divisor);
  const int first = each * block + min(block, rest), end = first + each + (block < rest ? 1 : 0);
  const int first_group = Quotient(first, down.strips_each);
  const int last_group = Quotient(max(end - 1, 0), down.strips_each);
  if (thread < 32 && first < end) {
    int before = 0;  // groups of earlier experts
#pragma unroll 1
    for (int window = 0; window < experts.experts && before <= last_group; window += 128) {
      int pairs_of[4], sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int expert = window + 4 * lane + i;
        pairs_of[i] = expert < experts.experts ? counts[expert] : 0;
        sum += (pairs_of[i] + most) >> shift;
      }
      int start = sum;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int earlier = __shfl_up_sync(~0u, start, distance);
        if (lane >= distance) start += earlier;
      }
      const int window_groups = __shfl_sync(~0u, start, 31);
      start += before - sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of_expert = (pairs_of[i] + most) >> shift;
        for (int g = max(first_group, start); g < min(start + of_expert, last_group + 1); ++g) {
          FewGroup& group = groups[g - first_group];
          group.expert = window + 4 * lane + i;
          group.first = (g - start) << shift;
          group.count = min(most + 1, pairs_of[i] - group.first);
        }
        start += of_expert;
      }
      before += window_groups;
    }
  }
  __syncthreads();
  return {first, end - first, first_group};
}

// By a warp for each group: its pairs, in order.
__device__ inline void FindGroupPairs(const FewTokens& experts, const int* memory,
                                      FewGroup& group) {
  const int lane = threadIdx.x % 32, pairs = experts.tokens * experts.k;
  const int* const expert_of = memory + experts.experts;
  int before = group.first;
#pragma unroll 4
  for (int window = 0; window < pairs; window += 32) {
    const int pair = window + lane;
    const bool mine = pair < pairs && expert_of[pair] == group.expert;
    const uint32_t all = __ballot_sync(~0u, mine);
    const int row = __popc(all & ((1u << lane) - 1)) - before;
    if (mine && row >= 0 && row < group.count) group.pair_of[row] = pair;
    before -= __popc(all);
  }
}

// Bytes of a block's rows, where before there are numbers of experts and pairs, and of all.
JGG_HOST_DEVICE int GroupedRowsBytes(const FewTokens& experts, int groups, int shift) {
  const int rows = (groups << shift) * experts.f * 2;
  const int lists = (experts.experts + experts.tokens * experts.k + 31) / 32 * 128;
  return rows < lists ? lists : rows;
}
template <typename Shape>
JGG_HOST_DEVICE int GroupedDownBytes(const FewTokens& experts, int groups, int shift) {
  return GroupedRowsBytes(experts, groups, shift) + Shape::kWarps * 2 * kStripSums * 4;
}

// A step of a strip, among those of a block: a tile of k, or none where there are few.
struct FewStep {
  int strip, group, k;  // strip: of the group

  __device__ FewStep(const FewGroupedDown& down, const FewPart& part, int step) {
    const int all = Quotient(step, down.steps_each);
    k = step - all * static_cast<int>(down.steps_each.divisor);
    const int before = Quotient(part.first + all, down.strips_each);
    strip = part.first + all - before * static_cast<int>(down.strips_each.divisor);
    group = before - part.first_group;
  }
  // Whether that is another strip.
  __device__ bool Next(const FewGroupedDown& down) {
    if (++k < static_cast<int>(down.steps_each.divisor)) return false;
    k = 0;
    if (++strip == static_cast<int>(down.strips_each.divisor)) strip = 0, ++group;
    return true;
  }
};

// Finish: loads and stores. The host has other code for these.
template <typename Weights, typename Shape, typename Finish>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    FewGroupedDownSm90Kernel(const __grid_constant__ FewGroupedDown down) {
  using Reader = typename Weights::template Reader<1>;
  constexpr int kWarps = Shape::kWarps, kAhead = Shape::kAhead;
  __shared__ FewGroup groups[kMostFewGroups];
  __shared__ int all_groups;
  AllowNextKernel();
  const FewTokens& experts = down.experts;
  const FewTokensWeight& w = experts.w;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int k_tiles = w.packed.k_tiles, steps_each = static_cast<int>(down.steps_each.divisor);
  char* const rows = DynamicMemory();
  // Sums of strips that a warp has whole, or has begun, and of those that another one has begun.
  float* const own = reinterpret_cast<float*>(
                         rows + GroupedRowsBytes(experts, down.most_groups, down.rows_shift)) +
                     warp * kStripSums;
  float* const head = own + kWarps * kStripSums;
  int* const lists = reinterpret_cast<int*>(rows);
  const FewPart part = FindPart<Shape::kThreads>(down, lists, groups, all_groups);
  // This warp's steps of those of all strips, one after the other.
  const int steps = part.count * steps_each;
  const auto begin_of = [&](int i) {
    return static_cast<int>(static_cast<uint32_t>(steps * i) / kWarps);
  };
  const int begin = begin_of(warp), end = begin_of(warp + 1);
  FewStep at(down, part, begin), next = at;  // next: to be loaded
  int left = end - begin, load_left = left;
  bool began = at.k == 0;  // the strip is this warp's from its first step on
  typename Weights::ThreadColumn from;
  const auto find_column = [&] {
    from = {Weights::ColumnOf(w.packed, w.scales, groups[next.group].expert, next.strip / 2),
            static_cast<uint32_t>(next.strip % 2 * 64 + lane)};
  };
  typename Reader::Words words[kAhead][kHalves];
  const auto load = [&](int i) {
    if (load_left == 0) return;
    --load_left;
    if (next.k < k_tiles) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        from.Load(Weights::TileScales(w.packed), static_cast<uint32_t>(next.k), h, words[i][h]);
      }
    }
    if (next.Next(down) && load_left > 0) find_column();
  };
  if (left > 0) find_column();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i);
  const auto store = [&](float* to, float (&sums)[kHalves][4]) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      reinterpret_cast<float4*>(to)[h * 32 + lane] =
          make_float4(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[h][i] = 0.0f;
    }
  };
  float sums[kHalves][4] = {};
  store(head, sums);
  const int group_count =
      part.count == 0
          ? 0
          : Quotient(part.first + part.count - 1, down.strips_each) - part.first_group + 1;
  if (warp < group_count) FindGroupPairs(experts, lists, groups[warp]);
  __syncthreads();
  WaitForPreviousKernel();
  // Lines of 128 bytes, tile by tile and row by row, whose pieces are swizzled by the row.
  const int tile_bytes = 128 << down.rows_shift;
  for (int i = warp; i < 8 * group_count; i += kWarps) {
    const int row = i % 8;
    const FewGroup& of = groups[i / 8];
    if (row >= of.count) continue;
    const char* const line = experts.a + static_cast<int64_t>(of.pair_of[row]) * experts.f * 2;
    char* const to = rows + i / 8 * k_tiles * tile_bytes + row * 128;
#pragma unroll 4
    for (int p = lane; p < k_tiles * 8; p += 32) {
      CopyPiece(line + p * 16, to + p / 8 * tile_bytes + (p % 8 ^ row) * 16, 16);
    }
  }
  WaitCopied();
  __syncthreads();
  // Where this lane has its piece of a row's first 32 k of a tile, and of its others.
  int x = 0, other_x = 0;
  const auto find_rows = [&] {
    const int row = min(lane % 8, groups[at.group].count - 1);
    x = (at.group * k_tiles + at.k) * tile_bytes + row * 128 + (lane / 8 ^ row) * 16;
    other_x = x ^ 64;
  };
  if (left > 0) find_rows();
#pragma unroll 1
  while (true) {
    int done = -1, done_group = 0;  // the strip that ends here, of which there is one at most
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (left == 0) break;
      if (at.k < k_tiles) {
#pragma unroll
        for (int part_of_k = 0; part_of_k < 2; ++part_of_k) {  // 32 k
          uint32_t of_x[4];
          LoadMatrices(rows + (part_of_k == 0 ? x : other_x), of_x);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            uint32_t a[8];
            Reader(0).template Read<2, true, ScaleRange::kAny>(words[i][h], 0, 2 * part_of_k, a);
            MultiplyWarp(a, of_x[0], of_x[1], sums[h]);
            MultiplyWarp(a + 4, of_x[2], of_x[3], sums[h]);
          }
        }
      }
      load(i);
      --left;
      x += tile_bytes, other_x += tile_bytes;
      const int strip = at.strip, group = at.group;
      if (!at.Next(down)) continue;
      store(began ? own : head, sums);
      if (began) done = strip, done_group = group;
      began = true;
      if (left > 0) find_rows();
    }
    const bool ends = done < 0;
    int others = 0;  // warps that have more of the strip
    if (ends) {
      if (left > 0) continue;
      // The last strip of this warp, of which other warps may have the rest.
      if (at.k > 0) store(began ? own : head, sums);
      __syncthreads();
      if (at.k == 0 || !began) break;
      done = at.strip, done_group = at.group;
      while (begin_of(warp + 1 + others) < end - at.k + steps_each) ++others;
    } else {
      __syncwarp();
    }
    const FewGroup& of = groups[done_group];
    const int column = done * kStrip + lane;
    const FewFactors<Weights, Finish> factors(w, of.expert, experts.d, column);
    for (int row = 0; row < of.count; ++row) {
      // Where a warp has the sum of the row and the column.
      const int place = lane / 16 * 128 + lane % 8 * 16 + row / 2 * 4 + lane % 16 / 8 * 2 + row % 2;
      float sum = own[place];
      for (int i = 1; i <= others; ++i) sum += head[i * kStripSums + place];
      const int pair = of.pair_of[row];
      experts.terms[static_cast<int64_t>(pair) * experts.d + column] =
          factors.Of(sum) * experts.expert_weight[pair];
    }
    if (ends) break;
    __syncwarp();
  }
}

constexpr int kSumThreads = 128, kSumColumns = 4 * kSumThreads;  // of a block

// Terms of a token's pairs, in the order of its choices. A thread has four columns.
template <typename Finish>
__global__ void __launch_bounds__(kSumThreads)
    FewSumSm90Kernel(const __grid_constant__ FewTokens experts) {
  const int token = blockIdx.y;
  const int column =
      4 * (static_cast<int>(blockIdx.x) * kSumThreads + static_cast<int>(threadIdx.x));
  uint32_t exist = 0;
  for (int j = 0; j < experts.k; ++j) {
    exist |= static_cast<uint32_t>(LocalExpert(experts, token * experts.k + j) >= 0) << j;
  }
  WaitForPreviousKernel();
  if (column >= experts.d) return;
  const float* const terms =
      experts.terms + static_cast<int64_t>(token) * experts.k * experts.d + column;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < rules::kMostFewChoices; ++j) {
    if ((exist >> j & 1) == 0) continue;
    const float4 term =
        *reinterpret_cast<const float4*>(terms + static_cast<int64_t>(j) * experts.d);
    sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
  }
  const int64_t to = static_cast<int64_t>(token) * experts.d + column;
  Finish::Store(experts.out, to, experts.out_dtype, sum.x);
  Finish::Store(experts.out, to + 1, experts.out_dtype, sum.y);
  Finish::Store(experts.out, to + 2, experts.out_dtype, sum.z);
  Finish::Store(experts.out, to + 3, experts.out_dtype, sum.w);
}

}  // namespace jgg::device

// Logits and choices of few tokens. A cluster has one token or several, and each of its blocks a
// part of d. So w is read by as many processors as a cluster may have, by all of them at once, and
// no other kernel has to add up what they have. A block sends the sums of its part to the block
// that has their token, which adds them in the order of the parts.
//
// w (d, experts): a thread has 4 experts, and every so many rows of the part. w (experts, d): a
// warp has some experts at a time, and a lane 4 of every 128 d.
#pragma once

#include <cstdint>

#include "moe/device/cluster_sm90.cuh"
#include "moe/device/top_k.cuh"
#include "moe/router.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

// Four neighbouring numbers of w, and what a thread has of them until it needs them.
template <bool kBFloat16>
struct RouterWords;

template <>
struct RouterWords<false> {
  float4 words;
  __device__ void Load(const void* w, int64_t at) {
    words = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(w) + at));
  }
  __device__ void Get(float* values) const {
    values[0] = words.x, values[1] = words.y, values[2] = words.z, values[3] = words.w;
  }
};

template <>
struct RouterWords<true> {
  uint2 words;
  __device__ void Load(const void* w, int64_t at) {
    words = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(w) + at));
  }
  __device__ void Get(float* values) const {
    values[0] = AsFloat(words.x << 16), values[1] = AsFloat(words.x & 0xffff0000u);
    values[2] = AsFloat(words.y << 16), values[3] = AsFloat(words.y & 0xffff0000u);
  }
};

// Eight neighbouring numbers of x.
__device__ inline void LoadEight(const void* x, int64_t at, DType dtype, float* values) {
  if (dtype == DType::kF32) {
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      RouterWords<false> four;
      four.Load(x, at + 4 * i);
      four.Get(values + 4 * i);
    }
    return;
  }
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at));
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    values[i] = dtype == DType::kBF16 ? Half<DType::kBF16>(pairs[i / 2], i % 2)
                                      : Half<DType::kF16>(pairs[i / 2], i % 2);
  }
}

// The cluster's tokens, and the block's part of d.
struct RouterPart {
  int token, tokens, first, rows;

  __device__ RouterPart(const RouterArgs& args, int most_tokens) {
    token = static_cast<int>(blockIdx.x) / ClusterBlocks() * most_tokens;
    tokens = min(most_tokens, args.choice.tokens - token);
    first = BlockOfCluster() * args.part;
    rows = max(0, min(args.part, args.d - first));
  }
};

// Brings x of a block to shared memory: element i of token t to i * each + t * line. Tokens that do
// not exist are zeros.
template <int kTokens>
__device__ void StageX(const RouterArgs& args, const RouterPart& part, int each, int line,
                       float* x) {
  const int eights = part.rows / 8;
  for (int n = threadIdx.x; n < kTokens * eights; n += BlockThreads()) {
    const int t = kTokens == 1 ? 0 : n / eights, i = n - t * eights;
    float values[8] = {};
    if (t < part.tokens) {
      const int64_t row = int64_t{part.token + t} * args.d + part.first;
      LoadEight(args.x, row + 8 * i, args.x_dtype, values);
    }
    JGG_UNROLL
    for (int j = 0; j < 8; ++j) x[(8 * i + j) * each + t * line] = values[j];
  }
}

// The sums of all lanes, of each of kCount numbers: lane l gets number l % kCount.
template <int kCount>
__device__ float SumOfLanes(float (&values)[kCount]) {
  const int lane = threadIdx.x % 32;
  JGG_UNROLL
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
    JGG_UNROLL
    for (int i = 0; i < half; ++i) {
      const float given = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(kAllLanes, given, half);
    }
  }
  float sum = values[0];
  JGG_UNROLL
  for (int mask = kCount; mask < 32; mask *= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  return sum;
}

// Sums of the block's part, of w (d, experts); send(token, expert, sum) gets each, once all blocks
// of the cluster run.
template <bool kBFloat16, int kTokens, typename Send>
__device__ void MultiplyRows(const RouterArgs& args, const RouterPart& part, float* x, float* all,
                             Send send) {
  constexpr int kBatch = 8;  // rows of a thread that are under way at once
  const int experts = args.choice.experts, fours = experts / 4;
  const int groups = RouterGroups(BlockThreads(), experts);
  const int four = static_cast<int>(threadIdx.x) % fours;
  const int group = static_cast<int>(threadIdx.x) / fours;
  RouterWords<kBFloat16> words[kBatch];
  const auto load = [&](int row) {
    JGG_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (row + i * groups >= part.rows) break;
      words[i].Load(args.w, int64_t{part.first + row + i * groups} * experts + 4 * four);
    }
  };
  // All that do not take part have no rows.
  int row = group < groups ? group : part.rows;
  load(row);
  StageX<kTokens>(args, part, kTokens, 1, x);
  __syncthreads();
  WaitForCluster();
  float sums[kTokens][4] = {};
  JGG_NO_UNROLL
  while (row < part.rows) {
    JGG_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (row + i * groups >= part.rows) break;
      float values[4];
      words[i].Get(values);
      const float* const factors = x + (row + i * groups) * kTokens;
      JGG_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        JGG_UNROLL
        for (int e = 0; e < 4; ++e) sums[t][e] = MultiplyAdd(factors[t], values[e], sums[t][e]);
      }
    }
    row += kBatch * groups;
    load(row);
  }
  if (group < groups) {
    JGG_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      float* const to = all + (group * kTokens + t) * experts + 4 * four;
      *reinterpret_cast<float4*>(to) = make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < part.tokens * experts; i += BlockThreads()) {
    float sum = 0.0f;
    for (int g = 0; g < groups; ++g) sum += all[g * kTokens * experts + i];
    const int t = kTokens == 1 ? 0 : i / experts;
    send(t, i - t * experts, sum);
  }
}

// The same of w (experts, d).
template <bool kBFloat16, int kTokens, typename Send>
__device__ void MultiplyColumns(const RouterArgs& args, const RouterPart& part, float* x,
                                Send send) {
  constexpr int kExperts = 8;  // of a warp at a time
  const int experts = args.choice.experts, lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, warps = BlockThreads() / 32;
  RouterWords<kBFloat16> words[kExperts] = {};  // those of no expert stay, and count nowhere
  const auto load = [&](int expert, int d) {
    if (d >= part.rows) return;
    JGG_UNROLL
    for (int i = 0; i < kExperts; ++i) {
      if (expert + i >= experts) break;
      words[i].Load(args.w, int64_t{expert + i} * args.d + part.first + d);
    }
  };
  int expert = warp * kExperts;
  load(expert, 4 * lane);
  const int line = RouterLine(args.part);
  StageX<kTokens>(args, part, 1, line, x);
  __syncthreads();
  WaitForCluster();
  JGG_NO_UNROLL
  for (; expert < experts; expert += warps * kExperts) {
    float sums[kTokens][kExperts] = {};
    JGG_NO_UNROLL
    for (int d = 4 * lane; d < part.rows; d += 128) {
      float values[kExperts][4];
      JGG_UNROLL
      for (int i = 0; i < kExperts; ++i) words[i].Get(values[i]);
      JGG_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const float4 factors = *reinterpret_cast<const float4*>(x + t * line + d);
        JGG_UNROLL
        for (int i = 0; i < kExperts; ++i) {
          float& sum = sums[t][i];
          sum = MultiplyAdd(factors.x, values[i][0], sum);
          sum = MultiplyAdd(factors.y, values[i][1], sum);
          sum = MultiplyAdd(factors.z, values[i][2], sum);
          sum = MultiplyAdd(factors.w, values[i][3], sum);
        }
      }
      load(expert, d + 128);
    }
    load(expert + warps * kExperts, 4 * lane);
    JGG_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const float sum = SumOfLanes<kExperts>(sums[t]);
      if (t >= part.tokens) continue;
      if (lane < kExperts && expert + lane < experts) send(t, expert + lane, sum);
    }
  }
}

// kItems: of 32 experts, as of TopK. kTokens: of a cluster; each of them has a block.
template <bool kBFloat16, bool kTransposed, int kItems, int kTokens>
__global__ void __launch_bounds__(kRouterThreads, kItems <= 4 && kTokens == 1 ? 2 : 1)
    RouterSm90Kernel(const __grid_constant__ RouterArgs args) {
  ArriveAtCluster<false>();
  const int experts = args.choice.experts, blocks = ClusterBlocks(), block = BlockOfCluster();
  const RouterPart part(args, kTokens);
  const RouterMemory memory =
      RouterMemoryOf(kTransposed, BlockThreads(), args.part, experts, blocks, kTokens);
  float* const x = reinterpret_cast<float*>(BlockMemory());
  float* const sums = x + memory.x;
  float* const received = sums + memory.sums;
  float* const logits = received + memory.received;
  const auto send = [&](int token, int expert, float sum) {
    WriteTo(token, received + block * experts + expert, sum);
  };
  if constexpr (kTransposed) {
    MultiplyColumns<kBFloat16, kTokens>(args, part, x, send);
  } else {
    MultiplyRows<kBFloat16, kTokens>(args, part, x, sums, send);
  }
  ArriveAtCluster<true>();
  WaitForCluster();
  if (block >= part.tokens) return;
  const int token = part.token + block;
  for (int expert = threadIdx.x; expert < experts; expert += BlockThreads()) {
    float sum = 0.0f;
    for (int b = 0; b < blocks; ++b) sum += received[b * experts + expert];
    if (args.logit_bias != nullptr) sum += args.logit_bias[expert];
    logits[expert] = sum;
    args.logits[int64_t{token} * experts + expert] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    ChooseExperts<kItems>(args.choice, token, logits, [&](int expert) { return logits[expert]; });
  }
}

}  // namespace jgg::device

// The experts of a token, and their weights: a warp has a token, and a lane every 32nd expert.
//
// The warp finds the best expert k times, by comparing each lane's best one; the lane that has it
// then leaves it out. Lane j keeps the expert that was found j-th, so k lanes have the k weights.
// Logits are in memory, or come from a product in the same kernel (router_sm90.cuh).
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/rules.h"
#include "moe/top_k.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr int kTopKWarps = 4;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kSmallestLogit = -87.33654475f;  // its sigmoid is the smallest normal number

// A rank, larger for larger numbers. NaN has the largest rank, and zeros of both signs have equal
// ranks. No number has rank 0 or 1.
__device__ inline uint32_t Ordered(float value) {
  const uint32_t bits = AsBits(value);
  return value < 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline float Logit(const TopKArgs& args, int64_t at) {
  if (!args.bfloat16) return static_cast<const float*>(args.logits)[at];
  return AsFloat(uint32_t{static_cast<const uint16_t*>(args.logits)[at]} << 16);
}

// The largest number of a warp; NaN does not count.
__device__ inline float WarpMax(float value) {
  JGG_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, mask));
  }
  return value;
}

__device__ inline float WarpSum(float value) {
  JGG_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}

__device__ inline float Sigmoid(float logit) { return 1.0f / (1.0f + expf(-logit)); }

// A lane's experts: number i is expert 32 * i + lane.
template <int kItems>
struct TokenScores {
  float score[kItems];    // what weights are made of
  uint32_t rank[kItems];  // the larger the better; 0 if the expert does not exist, or was taken

  // Takes the best expert of all lanes; there is at least one. Returns it and its score.
  __device__ int Take(int lane, float* of) {
    uint32_t best = 0;
    int item = 0;
    JGG_UNROLL
    for (int i = 0; i < kItems; ++i) {
      if (rank[i] > best) best = rank[i], item = i;
    }
    const uint32_t most = __reduce_max_sync(kAllLanes, best);
    // If several experts are the best, the first is chosen.
    const uint32_t expert = static_cast<uint32_t>(32 * item + lane);
    const uint32_t first = ~__reduce_max_sync(kAllLanes, best == most ? ~expert : 0);
    float value = 0;
    JGG_UNROLL
    for (int i = 0; i < kItems; ++i) {
      if (first != static_cast<uint32_t>(32 * i + lane)) continue;
      value = score[i];
      rank[i] = 0;
    }
    *of = __shfl_sync(kAllLanes, value, static_cast<int>(first % 32));
    return static_cast<int>(first);
  }
};

// Experts outside of the best groups rank below all others. `wanted` is the number by which all
// experts rank.
template <int kItems>
__device__ void KeepBestGroups(const TopKArgs& args, int lane, const float* wanted,
                               TokenScores<kItems>* token) {
  const int size = args.experts / args.groups;
  __syncwarp();
  // Lane g marks group g: by its best expert or, with a bias, the sum of its two best.
  TokenScores<1> mark{};
  if (lane < args.groups) {
    float best = 0, second = 0;
    uint32_t of_best = 0, of_second = 0;
    for (int j = 0; j < size; ++j) {
      // Groups may begin in one bank of shared memory; lanes do not.
      int at = j + lane % size;
      at -= at < size ? 0 : size;
      const float value = wanted[lane * size + at];
      const uint32_t order = Ordered(value);
      if (order > of_best) {
        second = best, of_second = of_best;
        best = value, of_best = order;
      } else if (order > of_second) {
        second = value, of_second = order;
      }
    }
    mark.rank[0] = Ordered(args.bias == nullptr || size == 1 ? best : best + second);
  }
  uint32_t kept = 0;
  for (int j = 0; j < args.top_groups; ++j) {
    float none;
    kept |= 1u << mark.Take(lane, &none);
  }
  JGG_UNROLL
  for (int i = 0; i < kItems; ++i) {
    if (token->rank[i] == 0 || (kept >> (32 * i + lane) / size & 1) != 0) continue;
    token->rank[i] = 1;
  }
}

// By a warp: the experts of one token, whose logits are logit_of(expert). `wanted`: shared memory
// of 32 * kItems numbers, which may be what logit_of reads.
template <int kItems, typename LogitOf>
__device__ void ChooseExperts(const TopKArgs& args, int token, float* wanted, LogitOf logit_of) {
  const int lane = threadIdx.x % 32;
  TokenScores<kItems> scores;
  float largest = -INFINITY;
  bool has_nan = false;
  JGG_UNROLL
  for (int i = 0; i < kItems; ++i) {
    const int expert = 32 * i + lane;
    const bool there = expert < args.experts;
    const float logit = there ? logit_of(expert) : -INFINITY;
    scores.score[i] = logit;
    scores.rank[i] = there ? Ordered(logit) : 0;
    largest = logit > largest ? logit : largest;
    has_nan = has_nan || logit != logit;
    wanted[expert] = logit;
  }
  const bool grouped = args.top_groups < args.groups, biased = args.bias != nullptr;
  // A softmax over all experts needs its sum; other weights need only the chosen logits.
  const bool of_all = !args.sigmoid && !args.renormalize;
  float total = 1;
  if (of_all || (biased && !args.sigmoid)) {
    largest = WarpMax(largest);
    float sum = 0;
    JGG_UNROLL
    for (int i = 0; i < kItems; ++i) {
      const float logit = scores.score[i];
      if (scores.rank[i] != 0 && logit == logit) sum += expf(logit - largest);
    }
    total = WarpSum(sum);
  }
  if (of_all || biased) {
    JGG_UNROLL
    for (int i = 0; i < kItems; ++i) {
      if (scores.rank[i] == 0) continue;
      const int expert = 32 * i + lane;
      const float logit = scores.score[i];
      const float score = args.sigmoid ? Sigmoid(logit) : expf(logit - largest) / total;
      if (of_all) scores.score[i] = score;
      if (!biased) continue;  // logits are in the order of exact scores
      const float rank = score + args.bias[expert];
      scores.rank[i] = Ordered(rank);
      wanted[expert] = rank;
    }
  }
  if (grouped) KeepBestGroups<kItems>(args, lane, wanted, &scores);
  int mine = 0;
  float value = 0;
  for (int j = 0; j < args.k; ++j) {
    float of_this = 0;
    const int expert = scores.Take(lane, &of_this);
    if (lane == j) mine = expert, value = of_this;
  }
  const bool has = lane < args.k, chose_nan = __ballot_sync(kAllLanes, has && value != value) != 0;
  if (args.renormalize) {
    const float most = WarpMax(has ? value : -INFINITY);
    if (!args.sigmoid) {
      value = expf(value - most);
    } else if (most > 0) {
      value = Sigmoid(value);
    } else {
      // Sigmoid(a) is exp(a) * Sigmoid(-a), and a factor exp(most) of all of them cancels.
      value = expf(value - most) * Sigmoid(-value);
    }
    value /= WarpSum(has ? value : 0.0f);
    if (args.sigmoid && most < kSmallestLogit && !chose_nan) value = 0;
  } else if (args.sigmoid) {
    value = Sigmoid(value);
  } else if (__ballot_sync(kAllLanes, has_nan) != 0) {
    value = NAN;
  }
  if (!has) return;
  const int64_t at = int64_t{token} * args.k + lane;
  args.expert[at] = mine;
  args.weight[at] = value * args.scale;
}

template <int kItems>
__global__ void __launch_bounds__(32 * kTopKWarps) TopK(const TopKArgs args) {
  __shared__ float wanted[kTopKWarps][32 * kItems];
  const int warp = threadIdx.x / 32, token = static_cast<int>(blockIdx.x) * kTopKWarps + warp;
  if (token >= args.tokens) return;
  const int64_t row = int64_t{token} * args.experts;
  ChooseExperts<kItems>(args, token, wanted[warp],
                        [&](int expert) { return Logit(args, row + expert); });
}

}  // namespace jgg::device

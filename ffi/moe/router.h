// A router of few tokens: logits x @ w, and the choice that top_k makes of them;
// jax_groupgemm/_moe/choose_for.py is the definition. Operands are float32 numbers, their products
// are summed in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "moe/rules.h"
#include "moe/top_k.h"

namespace jgg {

struct RouterArgs {
  TopKArgs choice;          // without logits
  const void* x;            // (tokens, d) of x_dtype
  const void* w;            // (d, experts), or (experts, d): float32 or bfloat16
  const float* logit_bias;  // (experts,), or null
  float* logits;            // (tokens, experts), a result
  int32_t d;
  int32_t part;  // d that a block has: a multiple of 8
  DType x_dtype;
};

// A block's threads; its warps choose experts in top_k's manner.
constexpr int kRouterThreads = 512;
static_assert(kRouterThreads >= rules::kMostRouterExperts / 4);
// Tokens of a cluster, where there are several.
constexpr int kRouterTokens = 2;

// Groups of threads that share out d, where w is (d, experts): each thread has 4 experts.
constexpr int RouterGroups(int threads, int experts) {
  return std::min(32, threads / (experts / 4));
}

// Shared memory of a block, in float32 numbers.
struct RouterMemory {
  int x;         // of the cluster's tokens, and its part of d
  int sums;      // of its groups of threads
  int received;  // from all blocks of the cluster
  int logits;    // of a token, and room for whole warps of experts

  constexpr int bytes() const { return 4 * (x + sums + received + logits); }
};

// Numbers of a token's x that there is room for.
constexpr int RouterLine(int part) { return (part + 127) / 128 * 128; }

// `tokens`: of a cluster.
constexpr RouterMemory RouterMemoryOf(bool transposed, int threads, int part, int experts,
                                      int blocks, int tokens) {
  RouterMemory memory{};
  memory.x = RouterLine(part) * tokens;
  memory.sums = transposed ? 0 : RouterGroups(threads, experts) * experts * tokens;
  memory.received = blocks * experts;
  memory.logits = rules::kMostRouterExperts;
  return memory;
}

}  // namespace jgg

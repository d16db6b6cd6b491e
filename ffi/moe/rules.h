// Why the kernels of mixtures of experts cannot take a call, and how they share out pairs: see
// common/rules.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/processors.h"
#include "common/rules.h"

namespace jgg::rules {

// What a block of route has room to count.
constexpr int kMostExperts = 1024;
// Pairs of token and expert that a block of route puts in order.
constexpr int kRoutePairs = 2048;

// The most pairs of the kernels of a few tokens' experts, and the most experts of a token. Blocks
// of another shape are for the fewest pairs.
constexpr int kMostFewPairs = 64, kMostFewChoices = 8, kFewestPairs = 16;
// The most pairs, and experts of a token, whose rows one kernel sorts and copies: blocks compare
// all pairs.
constexpr int kMostSomePairs = 1024, kMostSomeChoices = 32;
// Groups of an expert's pairs of a block that takes `down` by groups.
constexpr int kMostFewGroups = 16;
// What a block of them keeps: rows of x, or a token's rows of activations.
constexpr int kMostFewBytes = 192 << 10;
// ... with weights of 16 bits. GPUs of compute capability 8.6 have 99 KiB for a block.
constexpr int kMostFewDenseBytes = 96 << 10;
static_assert(kMostFewDenseBytes <= kLeastSharedMemory);

// The most experts that top_k chooses for a token, and the most groups that experts are in.
constexpr int kMostTopK = 32, kMostGroups = 32;

// The most tokens, experts and d of the kernel of a router. More tokens are faster in a product and
// a choice (docs/lab/moe_layer.md).
constexpr int kMostRouterTokens = 8, kMostRouterExperts = 512, kMostRouterWidth = 1 << 14;

// A token's experts: `groups` of neighbours, of which it meets k in some groups.
inline Reason MoeTopKProblem(int64_t experts, int64_t k, int64_t groups) {
  if (experts < 1 || experts > kMostExperts) {
    return "needs 1 to " + std::to_string(kMostExperts) + " experts, got " +
           std::to_string(experts);
  }
  if (k > kMostTopK) return "chooses up to 32 experts of a token, got " + std::to_string(k);
  if (groups > kMostGroups) return "needs up to 32 groups, got " + std::to_string(groups);
  return std::nullopt;
}

// Logits of few tokens, x (T, D), and the choice of k experts for each.
inline Reason MoeRouterProblem(int64_t tokens, int64_t d, int64_t experts, int64_t k,
                               int64_t groups) {
  const auto up_to = [](int most, const char* what, int64_t got) {
    return "needs up to " + std::to_string(most) + what + std::to_string(got);
  };
  if (tokens > kMostRouterTokens) return up_to(kMostRouterTokens, " tokens, got ", tokens);
  if (experts > kMostRouterExperts) return up_to(kMostRouterExperts, " experts, got ", experts);
  if (d > kMostRouterWidth) return up_to(kMostRouterWidth, " columns of x, got ", d);
  if (auto reason = MoeTopKProblem(experts, k, groups)) return reason;
  if (auto reason = NeedsMultiple("D", 8, d)) return reason;
  return NeedsMultiple("E", 4, experts);
}

inline Reason MoeRouteProblem(int64_t pairs, int64_t experts) {
  if (pairs > int64_t{1} << 30) return "there are more than 2^30 pairs: " + std::to_string(pairs);
  if (experts >= 1 && experts <= kMostExperts) return std::nullopt;
  return "needs 1 to " + std::to_string(kMostExperts) + " experts, got " + std::to_string(experts);
}

inline int64_t MoeRouteBlocks(int64_t pairs) { return (pairs + kRoutePairs - 1) / kRoutePairs; }

// Rows of d elements, for dispatch, combine and its backward pass.
inline Reason MoeRowsProblem(int64_t pairs, int64_t d, int element_bytes) {
  if (pairs > int64_t{1} << 30) return "there are more than 2^30 pairs: " + std::to_string(pairs);
  if (d > int64_t{1} << 24) return "rows are longer than 2^24, got D=" + std::to_string(d);
  return NeedsWholeLines("D", element_bytes, d);
}

// The experts of a few tokens at once: how many pairs, and how many of a token.
inline Reason FewTokensProblem(int64_t pairs, int64_t choices) {
  if (choices > kMostFewChoices) {
    return "needs at most " + std::to_string(kMostFewChoices) + " experts of a token";
  }
  if (pairs <= kMostFewPairs) return std::nullopt;
  return "needs at most " + std::to_string(kMostFewPairs) + " pairs of token and expert";
}

// So many rows of 16-bit values in `bytes` of shared memory.
inline Reason FewRowsProblem(const char* axis, int bytes, int64_t rows, int64_t got) {
  const int64_t most = bytes / 2 / std::max<int64_t>(rows, 1);
  if (got <= most) return std::nullopt;
  return "needs " + std::string(axis) + " up to " + std::to_string(most) +
         " with so many tokens, got " + std::to_string(got);
}

inline int64_t FewRowsOfTokens(int64_t pairs, int64_t choices) {
  return choices > 0 ? std::min<int64_t>(pairs / choices, 8) : 0;
}

// Whether `down` takes pairs by their experts (device/few_grouped_down_sm90.cuh): where enough of
// them meet an expert that another one meets, too. Times in us of 2^20 weights, on an H200.
inline bool FewDownByGroups(int64_t pairs, int64_t experts, int64_t matrix) {
  constexpr double kEachPair = 0.2, kEachGroup = 0.165, kMore = 5;
  if (pairs > kMostFewPairs || experts < 1 || experts > kMostExperts) return false;
  const double count = static_cast<double>(experts);
  const double chosen = count * (1 - std::pow(1 - 1 / count, static_cast<double>(pairs)));
  const double saved = kEachPair * static_cast<double>(pairs) - kEachGroup * chosen;
  return saved * static_cast<double>(matrix) > kMore * (1 << 20);
}

// Rows of the workspace of what pairs add; `matrix`: D * F.
inline int64_t MoeFewTermRows(int64_t pairs, int64_t experts, int64_t matrix) {
  return FewDownByGroups(pairs, experts, matrix) ? pairs : 1;
}

// `width`: D or F, the larger; `packed`: both weights are in layout "sm90".
inline Reason MoeFewTokensProblem(int64_t pairs, int64_t choices, int64_t width, bool packed) {
  if (!packed) return "needs weights of jax_groupgemm.prepack";
  if (auto reason = FewTokensProblem(pairs, choices)) return reason;
  const int64_t rows = std::max(choices, FewRowsOfTokens(pairs, choices));
  return FewRowsProblem("D and F", kMostFewBytes, rows, width);
}

// Likewise with weights of 16 bits.
inline Reason MoeFewDenseProblem(int64_t pairs, int64_t choices, int64_t d, int64_t f) {
  if (auto reason = FewTokensProblem(pairs, choices)) return reason;
  if (auto reason = NeedsMultiple("D", 8, d)) return reason;
  if (auto reason = NeedsMultiple("F", 8, f)) return reason;
  const int64_t rows = FewRowsOfTokens(pairs, choices);
  if (auto reason = FewRowsProblem("D", kMostFewDenseBytes, rows, d)) return reason;
  return FewRowsProblem("F", kMostFewDenseBytes, choices, f);
}

// Some tokens' experts: the kernels around the products, and what rows of whole 16 bytes need.
inline Reason MoeSomeTokensProblem(int64_t pairs, int64_t choices, int64_t experts, int64_t d,
                                   int64_t f) {
  if (experts > kMostExperts) {
    return "needs at most " + std::to_string(kMostExperts) + " experts, got " +
           std::to_string(experts);
  }
  if (choices > kMostSomeChoices) {
    return "needs at most " + std::to_string(kMostSomeChoices) + " experts of a token";
  }
  if (pairs > kMostSomePairs) {
    return "needs at most " + std::to_string(kMostSomePairs) + " pairs of token and expert";
  }
  if (auto reason = NeedsMultiple("D", 8, d)) return reason;
  return NeedsMultiple("F", 8, f);
}

// Columns of a block of its `down`: as many as leave a GPU one and a half blocks of each processor.
inline int FewDenseColumns(int64_t tokens, int64_t d) {
  for (int columns : {64, 32}) {
    if (2 * tokens * ((d + columns - 1) / columns) >= 3 * kH200Processors) return columns;
  }
  return 16;
}

}  // namespace jgg::rules

// Why the kernels of mixtures of experts cannot take a call, and how they share out pairs: see
// common/rules.h.
#pragma once

#include "common/rules.h"

namespace jgg::rules {

// What a block of route has room to count.
constexpr int kMostExperts = 1024;
// Pairs of token and expert that a block of route puts in order.
constexpr int kRoutePairs = 2048;

// The most pairs of the kernels of a few tokens' experts, and the most experts of a token.
constexpr int kMostFewPairs = 32, kMostFewChoices = 8;
// More pairs have kernels that keep rows of x and of activations, up to this D and F.
constexpr int kMostSomePairs = 64, kMostSomeWidth = 2048;

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

// The experts of a few tokens at once. `width`: D or F, the larger; `packed`: both weights are in
// layout "sm90".
inline Reason MoeFewTokensProblem(int64_t pairs, int64_t choices, int64_t width, bool packed) {
  // Longer sums are made of parts, as of other products with bfloat16 results.
  if (width > int64_t{1} << 17) return "needs D and F up to 2^17, got " + std::to_string(width);
  if (!packed) return "needs weights of jax_groupgemm.prepack";
  if (choices > kMostFewChoices) {
    return "needs at most " + std::to_string(kMostFewChoices) + " experts of a token";
  }
  if (pairs > kMostSomePairs) {
    return "needs at most " + std::to_string(kMostSomePairs) + " pairs of token and expert";
  }
  if (pairs > kMostFewPairs && width > kMostSomeWidth) {
    return "needs D and F up to " + std::to_string(kMostSomeWidth) + " with more than " +
           std::to_string(kMostFewPairs) + " pairs, got " + std::to_string(width);
  }
  return std::nullopt;
}

}  // namespace jgg::rules

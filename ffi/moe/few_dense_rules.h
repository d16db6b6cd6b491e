// Why the kernels of a few tokens' experts with 16-bit weights cannot take a call, and in which
// shapes they run it: see common/rules.h.
#pragma once

#include <algorithm>

#include "common/processors.h"
#include "moe/rules.h"

namespace jgg::rules {

// What a block of them keeps: rows of x, or a token's rows of activations. GPUs of compute
// capability 8.6 have 99 KiB for a block.
constexpr int kMostFewDenseBytes = 96 << 10;

// The experts of a few tokens at once, with weights of 16 bits.
inline Reason MoeFewDenseProblem(int64_t pairs, int64_t choices, int64_t d, int64_t f) {
  if (choices > kMostFewChoices) {
    return "needs at most " + std::to_string(kMostFewChoices) + " experts of a token";
  }
  if (pairs > kMostFewPairs) {
    return "needs at most " + std::to_string(kMostFewPairs) + " pairs of token and expert";
  }
  if (auto reason = NeedsMultiple("D", 8, d)) return reason;
  if (auto reason = NeedsMultiple("F", 8, f)) return reason;
  const int64_t tokens = choices > 0 ? pairs / choices : 0;
  const auto up_to = [](const char* axis, int64_t rows, int64_t got) -> Reason {
    const int64_t most = kMostFewDenseBytes / 2 / std::max<int64_t>(rows, 1);
    if (got <= most) return std::nullopt;
    return "needs " + std::string(axis) + " up to " + std::to_string(most) +
           " with so many tokens, got " + std::to_string(got);
  };
  if (auto reason = up_to("D", std::min<int64_t>(tokens, 8), d)) return reason;
  return up_to("F", choices, f);
}

// Columns of a block of `down`: as many as leave a GPU one and a half blocks of each processor.
inline int FewDenseColumns(int64_t tokens, int64_t d) {
  for (int columns : {64, 32}) {
    if (2 * tokens * ((d + columns - 1) / columns) >= 3 * kH200Processors) return columns;
  }
  return 16;
}

}  // namespace jgg::rules

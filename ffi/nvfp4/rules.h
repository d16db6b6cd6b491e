// The products of the Blackwell kernels, and why they cannot take one, from static shapes: see
// common/rules.h. The workspace is layout.h's.
#pragma once

#include "common/rules.h"
#include "nvfp4/layout.h"

namespace jgg::nvfp4 {

// out (T, N) of x (T, K) and w (G, N, K).
inline Product GroupedMm(int64_t tokens, int64_t groups, int64_t n, int64_t k, int out_size) {
  Product product{};
  product.ragged_k = false;
  product.groups = static_cast<int32_t>(groups);
  product.tokens = static_cast<int32_t>(tokens);
  product.n = static_cast<int32_t>(n);
  product.k = static_cast<int32_t>(k);
  product.out_size = out_size;
  return product;
}

// out (G, N, K) float32 of dy (N, P) and x (K, P).
inline Product GroupedWgrad(int64_t tokens, int64_t padded_tokens, int64_t groups, int64_t n,
                            int64_t k) {
  Product product{};
  product.ragged_k = true;
  product.groups = static_cast<int32_t>(groups);
  product.tokens = static_cast<int32_t>(tokens);
  product.m = static_cast<int32_t>(n);
  product.n = static_cast<int32_t>(k);
  product.k = static_cast<int32_t>(padded_tokens);
  product.out_size = 4;
  return product;
}

// Why no product of this kind can be; nothing where it can. TMA's lines are whole 16 bytes.
inline rules::Reason ShapeProblem(const Product& p) {
  if (!p.ragged_k) {
    if (auto reason = rules::NeedsMultiple("K", 32, p.k)) return reason;
  }
  return rules::NeedsWholeLines(p.ragged_k ? "K" : "N", p.out_size, p.n);
}

}  // namespace jgg::nvfp4

// Why the Hopper kernels of FP8 products cannot take a call, from static shapes: see
// common/rules.h.
#pragma once

#include "common/rules.h"

namespace jgg::rules {

// x (T, K) @ w (G, N, K): TMA copies lines of whole 16 bytes, of codes and of the result.
inline Reason Fp8MmSm90Problem(int64_t k, int64_t n) {
  if (auto reason = NeedsMultiple("K", 16, k)) return reason;
  return NeedsMultiple("N", 8, n);
}

// out (G, N, K) of dy (N, T) and x (K, T), of groups in whole blocks of 128 rows.
inline Reason Fp8WgradSm90Problem(int64_t k) { return NeedsMultiple("K", 8, k); }

}  // namespace jgg::rules

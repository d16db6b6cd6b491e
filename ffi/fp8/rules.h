// Why the kernels of FP8 products and of fp8_quantize cannot take a call, from static shapes: see
// common/rules.h.
#pragma once

#include "common/rules.h"

namespace jgg::rules {

// x (T, K) @ w (G, N, K): TMA copies lines of whole 16 bytes, of codes and of the result. The calls
// pad lines to that (_fp8/call.py), so only handlers ask this rule and the next one.
inline Reason Fp8MmSm90Problem(int64_t k, int64_t n) {
  if (auto reason = NeedsMultiple("K", 16, k)) return reason;
  return NeedsMultiple("N", 8, n);
}

// Whether rows are the instruction's M: from so many rows of each group on. float32 results have no
// such kernel.
inline bool Fp8RowsFirstSm90(int64_t rows, int64_t segments) {
  return RowsPerSegment(rows, segments) >= 448;
}

// out (G, N, K) of dy (N, T) and x (K, T), of groups in whole blocks of 128 rows.
inline Reason Fp8WgradSm90Problem(int64_t k) { return NeedsMultiple("K", 8, k); }

// x (R, C), R of all matrices together; `along` is the length of a line of the result where blocks
// lie along R, else 0. Lines of x and of codes are read and written in pieces of 8 or 16 elements.
inline Reason Fp8QuantizeProblem(int64_t rows, int64_t columns, int64_t along) {
  if (auto reason = NeedsMultiple("C", 8, columns)) return reason;
  if (auto reason = NeedsMultiple("R", 16, along)) return reason;
  // Blocks along C are counted in 32 bits.
  if (along == 0 && rows > INT32_MAX / ((columns + 127) / 128)) {
    return "needs fewer than 2^31 blocks";
  }
  return std::nullopt;
}

// x (R, C), R of all matrices together, to codes with a scale that is known. `along` as above.
// Codes are written in pieces of 16.
inline Reason Fp8CastProblem(int64_t columns, int64_t along) {
  if (auto reason = NeedsMultiple("C", 16, columns)) return reason;
  return NeedsMultiple("R", 16, along);
}

// Codes (R, C), R of all matrices together.
inline Reason Fp8DequantizeProblem(int64_t rows, int64_t columns) {
  if (auto reason = Fp8QuantizeProblem(rows, columns, 0)) return reason;
  if (rows > ((int64_t{1} << 33) - 1) / columns) return "needs fewer than 2^33 codes";
  return std::nullopt;
}

// Shared memory of a block of fp8_activation_backward: more than GPUs of compute
// capability 8.6, 8.9 and 12 have.
constexpr int kFp8ActivationBackwardBytes = 112 << 10;

// A gated activation of h (R, 2F), or its backward pass, whose blocks also lie along rows. Pieces
// of 8 are read; with blocks along rows both halves of h have whole blocks.
inline Reason Fp8ActivationProblem(int64_t columns, bool along_rows) {
  return NeedsMultiple("F", along_rows ? 128 : 8, columns);
}

}  // namespace jgg::rules

// Why the Hopper and Blackwell kernels cannot take an mm or a wgrad, from static shapes: see
// common/rules.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/processors.h"
#include "common/rules.h"

namespace jgg::rules {

// An mm: x (T, K) @ w (G, K, N).
struct MmShape {
  int64_t k, n;
  int element_bytes = 2;
  int planes = 1;  // of float32 operands; then k has been filled up to whole 64
  bool transpose_x = false, transpose_w = false, transpose_out = false;
  bool in_order = true;  // the segments' rows in the result are ascending and disjoint
  bool gated = false;    // N has two halves
  bool by_list = false;  // rows of x or the result come by list
  // The sums before the activation are rounded, or are a result, too. Then threads do all of the
  // epilogue in registers.
  bool preactivation = false;
  bool more_options = false;  // row_scale or existing_out, or a bias beside rows by list
  bool same_dtype = true;     // the result has the operands' dtype
};

inline Reason MmSm90Problem(const MmShape& mm) {
  if (!mm.in_order) return "segments may overlap or come in any order";
  if (mm.transpose_x) return "x is transposed";
  if (mm.transpose_out) return "the result is transposed";
  if (mm.preactivation) {
    if (!mm.gated) return "the preactivation of an activation that is not gated";
    if (mm.more_options) return "options beside a preactivation";
    if (!mm.same_dtype) return "the result has another dtype than the operands";
  }
  if (mm.planes > 1) {
    if (mm.by_list) return "rows by list of split operands";
    if (mm.gated) return "a gated activation of split operands";
    // Behind the k of one plane comes the next.
    if (auto reason = NeedsMultiple("K", 64, mm.k)) return reason;
    return mm.transpose_w ? std::nullopt : NeedsWholeLines("N", mm.element_bytes, mm.n);
  }
  if (auto reason = NeedsWholeLines("K", mm.element_bytes, mm.k)) return reason;
  if (mm.transpose_w) return std::nullopt;
  // The second half of a gated N begins in the middle of a line.
  if (mm.gated && NeedsWholeLines("N", mm.element_bytes, mm.n / 2)) {
    return NeedsMultiple("N", 2 * 16 / mm.element_bytes, mm.n);
  }
  // One column is contiguous along K, too.
  return mm.n == 1 ? std::nullopt : NeedsWholeLines("N", mm.element_bytes, mm.n);
}

// A wgrad: out (G, A, B) of x (T, A) and y (T, B).
struct WgradShape {
  int64_t rows_x, rows_y, a, b;
  int element_bytes = 2;
  int planes = 1;                                 // of float32 operands
  bool transpose_x = false, transpose_y = false;  // contiguous along T, which is contracted
  bool own_weight = true;                         // segment s is for weight s, and no other
  bool segments = false;                          // metadata is a table of segments
  bool x_by_list = false, y_by_list = false;
  bool more_options = false;  // a scale, or an existing result
  bool same_dtype = true;     // the result has the operands' dtype
};

inline Reason WgradSm90Problem(const WgradShape& wgrad) {
  if (!wgrad.own_weight) return "weights may have several segments";
  if (wgrad.transpose_x && wgrad.transpose_y && wgrad.segments) {
    return "both operands are contiguous along k, and segments may begin at different places in "
           "them";
  }
  if (wgrad.x_by_list || wgrad.y_by_list) {
    if (wgrad.x_by_list && wgrad.y_by_list) return "both operands come by list";
    if (wgrad.element_bytes != 2 || wgrad.planes > 1) return "rows by list of float32 operands";
    if (wgrad.transpose_x || wgrad.transpose_y) return "rows by list of transposed operands";
    if (wgrad.more_options) return "options beside rows by list";
    if (wgrad.segments) return "segments beside rows by list";
    if (!wgrad.same_dtype) return "the result has another dtype than the operands";
  }
  auto reason = wgrad.transpose_x ? NeedsWholeLines("T", wgrad.element_bytes, wgrad.rows_x)
                                  : NeedsWholeLines("A", wgrad.element_bytes, wgrad.a);
  if (reason) return reason;
  return wgrad.transpose_y ? NeedsWholeLines("T", wgrad.element_bytes, wgrad.rows_y)
                           : NeedsWholeLines("B", wgrad.element_bytes, wgrad.b);
}

// Blackwell's kernel has no options. Lines of the result are whole 16 bytes, too.
inline Reason MmSm100Problem(const MmShape& mm) {
  if (!mm.in_order) return "segments may overlap or come in any order";
  if (mm.transpose_x) return "x is transposed";
  if (mm.transpose_out) return "the result is transposed";
  if (mm.by_list) return "rows come by list";
  if (auto reason = NeedsWholeLines("K", mm.element_bytes, mm.k)) return reason;
  return NeedsWholeLines("N", mm.element_bytes, mm.n);
}

inline Reason WgradSm100Problem(const WgradShape& wgrad) {
  if (!wgrad.own_weight) return "weights may have several segments";
  if (wgrad.transpose_x || wgrad.transpose_y) return "an operand is transposed";
  if (wgrad.x_by_list || wgrad.y_by_list) return "rows come by list";
  if (wgrad.more_options) return "it has no options";
  if (auto reason = NeedsWholeLines("A", wgrad.element_bytes, wgrad.a)) return reason;
  return NeedsWholeLines("B", wgrad.element_bytes, wgrad.b);
}

// The backward pass of an activation, of d (T, columns), in pieces of 16 bytes.
inline Reason ActivationBackwardProblem(int64_t columns) {
  return NeedsMultiple("columns", 8, columns);
}

// A product of low rank for each row: device/lora_sm80.cuh.
inline Reason LoraProblem(int64_t rank, int64_t k, int64_t n) {
  if (rank != 8 && rank != 16 && rank != 32 && rank != 64) {
    return "needs rank 8, 16, 32 or 64, got " + std::to_string(rank);
  }
  if (auto reason = NeedsMultiple("K", 8, k)) return reason;
  return NeedsMultiple("N", 8, n);
}

// Whether an H200 has a multiprocessor for each pair, and rows for each multiprocessor.
constexpr bool LoraIsDeep(int64_t rows, int64_t pairs) {
  return pairs <= kH200Processors && rows > kH200Processors;
}

// Rows of a block: one, until there are more blocks than a GPU holds at a time.
inline int LoraSpan(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(rows / 1024, 1, 16));
}

// Blocks that share out the columns of a pair's weight gradient: a block has 4 warps, and a warp
// 4 tiles of 64 columns, and more only where a grid has no more blocks.
constexpr int LoraWgradParts(int64_t columns) {
  return static_cast<int>(std::min<int64_t>((columns + 1023) / 1024, 32767));
}

}  // namespace jgg::rules

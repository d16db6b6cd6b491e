// The Blackwell kernels of mm and wgrad read shapes, addresses and a workspace: this says where
// they lie. It is plain C++, which tests/lib/groups_sm100.cc tries on the host.
//
// Both products are out_p = A_p B_p:
//   mm     A (T, K), whose rows are segments, B a weight (K, N)     (ragged rows)
//   wgrad  A (A, T), B (T, B), whose k are the rows of a segment    (ragged K)
// FP8's operands have scales for blocks of 128 k, and are contiguous along k.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/grouped_sm100.h"
#include "grouped_mm/segments.h"

namespace jgg::sm100 {

struct Product {
  bool wgrad;               // which
  int64_t rows_x, rows_y;   // mm: of x and the result; wgrad: of x and y
  int64_t weights;          // matrices of w, or of the result
  int64_t m, n, k;          // wgrad: m x n per matrix; mm: n columns (of w), k
  bool k_major;             // mm: w, wgrad: both operands are contiguous along k
  int in_bytes, out_bytes;  // of an element

  // Elements from one line to the next.
  constexpr int64_t a_line() const { return !wgrad ? k : k_major ? rows_x : m; }
  constexpr int64_t b_line() const { return !k_major ? n : wgrad ? rows_y : k; }
  // From one row to the next, in wgrad.
  constexpr int64_t a_row() const { return k_major ? 1 : m; }
  constexpr int64_t b_row() const { return k_major ? 1 : n; }
};

// How many products a call may have. Sizes and spans have one for each matrix.
constexpr int64_t MostProblems(const Product& product, MetadataKind kind, int64_t count) {
  if (product.wgrad || kind == MetadataKind::kSizes) return product.weights;
  return count;
}

// One of them: its shape, zeros where there is none, and the bytes at which it begins.
struct GroupProblem {
  int32_t m, n, k;
  int64_t a, b, out;
  int32_t x_start, matrix;
};

// The product of a segment, for a matrix.
constexpr GroupProblem MakeProblem(const Product& p, const Segment& segment, int32_t matrix) {
  GroupProblem problem{};
  // NOTE: never k = 0 with rows and columns: CUTLASS 4.2 stores what no product has written.
  if (segment.length == 0 || (!p.wgrad && p.k == 0)) return problem;
  const int64_t x = segment.x_start, y = segment.y_start;
  problem.m = p.wgrad ? static_cast<int32_t>(p.m) : segment.length;
  problem.n = static_cast<int32_t>(p.n);
  problem.k = p.wgrad ? segment.length : static_cast<int32_t>(p.k);
  problem.a = x * (p.wgrad ? p.a_row() : p.k) * p.in_bytes;
  problem.b = (p.wgrad ? y * p.b_row() : matrix * p.k * p.n) * p.in_bytes;
  problem.out = (p.wgrad ? matrix * p.m : y) * p.n * p.out_bytes;
  problem.x_start = segment.x_start;
  problem.matrix = matrix;
  return problem;
}

// Rows of the result of mm that no segment reaches.
struct Gap {
  int32_t begin, end;
};

struct Workspace {
  int64_t shapes, a, b, out;               // for each product
  int64_t stride_a, stride_b, stride_out;  // likewise
  int64_t gaps, gap_count;                 // mm: the Gaps, and how many
  int64_t tensor_maps;
  int64_t bytes;

  // `count` entries of metadata.
  Workspace(int64_t problems, int64_t count) {
    Arena arena;
    shapes = arena.Take(problems * kShapeBytes);
    for (int64_t* pointers : {&a, &b, &out}) *pointers = arena.Take(problems * 8);
    for (int64_t* strides : {&stride_a, &stride_b, &stride_out}) {
      *strides = arena.Take(problems * kStrideBytes);
    }
    gaps = arena.Take((count + 1) * static_cast<int64_t>(sizeof(Gap)));
    gap_count = arena.Take(4);
    tensor_maps = arena.Take(kTensorMapBytes);
    bytes = arena.bytes();
  }
};

// FP8 products have scales, too.
inline constexpr int kScaleLayoutBytes = 20;  // a cute type, see fp8/scales_sm100.cuh

struct ScaledWorkspace {
  Workspace groups;
  int64_t scales_a, scales_b, layout_a, layout_b;  // for each product
  int64_t bytes;

  ScaledWorkspace(int64_t problems, int64_t count) : groups(problems, count) {
    Arena arena(groups.bytes);
    for (int64_t* pointers : {&scales_a, &scales_b}) *pointers = arena.Take(problems * 8);
    for (int64_t* layouts : {&layout_a, &layout_b}) {
      *layouts = arena.Take(problems * kScaleLayoutBytes);
    }
    bytes = arena.bytes();
  }
};

// Bytes of a call's workspace, from what Python knows.
inline int64_t WorkspaceBytes(int64_t weights, int64_t count, bool scaled = false) {
  const int64_t problems = std::max(weights, count);
  return scaled ? ScaledWorkspace(problems, count).bytes : Workspace(problems, count).bytes;
}

}  // namespace jgg::sm100

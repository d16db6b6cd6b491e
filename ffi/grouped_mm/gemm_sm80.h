// The generic GPU kernel of mm and wgrad: compute capability 8.0 and newer, any shape, any
// alignment, every operand in either major.
//
// Both products are tiles out[m, n] = sum_k A[m, k] B[n, k] whose operands are cut out by segments:
//   mm     m: rows of x         n: columns of w   k: all of K           (ragged rows)
//   wgrad  m: columns of x      n: columns of y   k: rows of a segment  (ragged K)
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/mm.h"
#include "grouped_mm/wgrad.h"

namespace jgg {

// The kernel's argument. A "line" is a run of elements that are contiguous in memory:
// a row of a K-major operand, a k of an MN-major one.
struct GemmSm80 {
  enum class Product { kMm, kWgrad };
  enum class Order {
    kSegments,  // one piece of work per tile of a segment, found by a scan of all segments
    kDetect,    // mm: the same, unless segments prove to overlap or to be out of order
    kResult,    // one piece of work per tile of the result, which looks for its segments
    kMatrices,  // wgrad: the same, where matrix g has segment g
  };
  Product product;
  Order order;
  int run_bits = 0;            // log2 of how many tiles beside each other a block takes at a time
  bool longest_first = false;  // kMatrices, up to 32 of them: so that no long one begins last
  const void* a;
  const void* b;
  void* out;
  DType out_dtype;
  int64_t a_line, b_line;  // elements from one line to the next
  int64_t b_group;         // mm: elements from one weight to the next
  int a_width, b_width;    // elements per copy that alignment allows, a power of two
  int64_t rows_x, rows_y;  // mm: of x and the result; wgrad: of x and y
  int64_t m, n, k;         // wgrad: m x n per weight; mm: n columns and k
  int64_t groups;          // weights
  int64_t out_group;       // wgrad: elements from one matrix of the result to the next
  int64_t out_m, out_n;    // elements from one row (column) of the result to the next
  int out_width;           // elements per store that alignment allows
  Metadata metadata;
  Epilogue epilogue;
};

cudaError_t LaunchGemmSm80(cudaStream_t stream, const GemmSm80& gemm, DType dtype, bool tf32,
                           bool a_k_major, bool b_k_major);

// Instances: gemm_sm80_instance.cu.
template <typename Element, bool kAKMajor, bool kBKMajor>
cudaError_t LaunchGemmSm80Instance(cudaStream_t stream, const GemmSm80& gemm);

}  // namespace jgg

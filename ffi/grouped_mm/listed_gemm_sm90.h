// The Hopper kernel of products of which one operand comes by list, where rows are many: x of mm,
// or one operand of wgrad. In mm a gated activation of rounded sums, or the backward pass of one.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"

namespace jgg {

// mm, where its sums d are the cotangent of row_scale * swiglu(h): the result is row_scale times
// the activation, and the other results are the cotangent of h and sums of d times the activation.
struct BackwardSm90 {
  CUtensorMap h_map, dh_map, dh_rest;  // their halves are matrices; boxes of 64 and of 8 rows
  const void* h;                       // (T, 2N), or null: just the product
  void* dh;                            // (T, 2N)
  const float* row_scale;              // (T,)
  float* row_sums;                     // (ceil(N / 16), T): of 16 columns each
};

struct ListedGemmSm90 {
  GemmSm90 gemm;     // without a tensor map of the operand that comes by list
  const void* data;  // that operand: `list.count` rows
  RowList list;
  BackwardSm90 backward = {};
};

// wgrad: `transposed` where L is y, and R x.
cudaError_t LaunchListedGemmSm90(cudaStream_t stream, ListedGemmSm90& listed,
                                 const OperandsSm90& operands, bool transposed);

// Instantiated in listed_gemm_sm90.cu.
template <typename Element>
cudaError_t LaunchListedGemmSm90Instance(cudaStream_t stream, ListedGemmSm90& listed,
                                         const OperandsSm90& operands, bool transposed);

}  // namespace jgg

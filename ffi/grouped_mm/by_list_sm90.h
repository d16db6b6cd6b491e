// The Hopper kernels of products with rows by list: neither an operand nor the result is permuted
// in memory.
//   rows by list        mm of few rows: out[y_rows[t]] = x[x_rows[t]] @ w[group(t)]
//   an operand by list  x of mm or one operand of wgrad, where rows are many. mm may also make a
//                       gated activation of rounded sums, or the backward pass of one
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"

namespace jgg {

struct RowsByListSm90 {
  GemmSm90 gemm;  // without a tensor map of x or the result; rows as segments count them
  const void* x;
  RowList x_list, y_list;
};

struct OperandByListSm90 {
  GemmSm90 gemm;     // without a tensor map of the operand that comes by list
  const void* data;  // that operand: `list.count` rows
  RowList list;
};

// mm, where its sums d are the cotangent of row_scale * swiglu(h): the result is row_scale times
// the activation, and the other results are the cotangent of h and sums of d times the activation.
struct BackwardSm90 {
  CUtensorMap h_map, dh_map, dh_rest;  // their halves are matrices; boxes of 64 and of 8 rows
  const void* h;                       // (T, 2N)
  void* dh;                            // (T, 2N)
  const float* row_scale;              // (T,)
  float* row_sums;                     // (ceil(N / 16), T): of 16 columns each
};

struct BackwardByListSm90 : OperandByListSm90 {
  BackwardSm90 backward;
};

cudaError_t LaunchRowsByListSm90(cudaStream_t stream, RowsByListSm90& by_list,
                                 const OperandsSm90& operands);

// wgrad: `transposed` where L is y, and R x.
cudaError_t LaunchOperandByListSm90(cudaStream_t stream, OperandByListSm90& by_list,
                                    const OperandsSm90& operands, bool transposed);

cudaError_t LaunchBackwardByListSm90(cudaStream_t stream, BackwardByListSm90& by_list,
                                     const OperandsSm90& operands);

// Instantiated in rows_by_list_sm90.cu and operand_by_list_sm90.cu.
template <typename Element, bool kRKMajor>
cudaError_t LaunchRowsByListSm90Instance(cudaStream_t stream, RowsByListSm90& by_list,
                                         const OperandsSm90& operands);
template <typename Element>
cudaError_t LaunchOperandByListSm90Instance(cudaStream_t stream, OperandByListSm90& by_list,
                                            const OperandsSm90& operands, bool transposed);
template <typename Element>
cudaError_t LaunchBackwardByListSm90Instance(cudaStream_t stream, BackwardByListSm90& by_list,
                                             const OperandsSm90& operands);

}  // namespace jgg

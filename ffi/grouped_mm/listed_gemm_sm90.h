// The Hopper kernel of products of which one operand comes by list, where rows are many: x of mm,
// or one operand of wgrad. Nothing but the product, and in mm a gated activation of rounded sums.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"

namespace jgg {

struct ListedGemmSm90 {
  GemmSm90 gemm;     // without a tensor map of the operand that comes by list
  const void* data;  // that operand: `list.count` rows
  RowList list;
};

// wgrad: `transposed` where L is y, and R x.
cudaError_t LaunchListedGemmSm90(cudaStream_t stream, ListedGemmSm90& listed,
                                 const OperandsSm90& operands, bool transposed);

// Instantiated in listed_gemm_sm90.cu.
template <typename Element>
cudaError_t LaunchListedGemmSm90Instance(cudaStream_t stream, ListedGemmSm90& listed,
                                         const OperandsSm90& operands, bool transposed);

}  // namespace jgg

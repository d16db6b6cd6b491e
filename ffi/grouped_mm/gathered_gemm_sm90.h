// The Hopper kernel of mm with rows by list: out[y_rows[t]] = x[x_rows[t]] @ w[group(t)]; T (rows)
// is grouped. Neither x nor the result is permuted in memory.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"

namespace jgg {

struct GatheredGemmSm90 {
  GemmSm90 gemm;  // without a tensor map of x or the result; rows as segments count them
  const void* x;
  RowList x_list, y_list;
};

cudaError_t LaunchGatheredGemmSm90(cudaStream_t stream, GatheredGemmSm90& gathered,
                                   const OperandsSm90& operands);

// Instantiated in gathered_gemm_sm90.cu.
template <typename Element, bool kRKMajor>
cudaError_t LaunchGatheredGemmSm90Instance(cudaStream_t stream, GatheredGemmSm90& gathered,
                                           const OperandsSm90& operands);

}  // namespace jgg

// The Blackwell kernels of products of two FP8 operands with scales for blocks of 128 k:
// tcgen05.mma by CUTLASS. As gemm_sm90.h has them:
//   out[r, c] = sum_s a[r, s] b[c, s] sum_{k in block s} A[r, k] B[c, k]
// In mm A is rows of x, scaled row by row, and B columns of w, of which each block of 128 has one
// scale. In wgrad both are scaled line by line, and k are rows of a group, whose blocks are its
// own. Scales lie as quantizing leaves them, the blocks of a line one after another.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm100.h"

namespace jgg {

struct Fp8GemmSm100 {
  GemmSm100 gemm;  // dtype is not used
  const float* a_scales;
  const float* b_scales;
  bool accumulate = false;  // wgrad: `out` holds what is added to
};

cudaError_t LaunchFp8GemmSm100(cudaStream_t stream, const Fp8GemmSm100& fp8);

// The kernels that run before the product. `base` is the workspace, aligned.
cudaError_t PrepareFp8Sm100(cudaStream_t stream, const Fp8GemmSm100& fp8,
                            const sm100::ScaledWorkspace& at, uint8_t* base);

// The product. Instantiated in gemm_sm100.cu.
template <typename Out, bool kWgrad>
cudaError_t MultiplyFp8Sm100(cudaStream_t stream, const Fp8GemmSm100& fp8,
                             const sm100::ScaledWorkspace& at, uint8_t* base);

}  // namespace jgg

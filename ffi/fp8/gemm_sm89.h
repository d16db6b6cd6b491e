// Products of two FP8 operands by mma.sync, from compute capability 8.9 on:
//   out[r, c] = sum_s a[r, s] b[c, s] sum_{k in block s} A[r, k] B[c, k]
// In mm A is rows of x, scaled row by row, and B columns of w, of which each block of 128 has one
// scale. In wgrad both are scaled line by line, and k are rows of a group, whose blocks are its
// own. Both operands lie along k. It is grouped_mm's pipeline (grouped_mm/gemm_sm80.h) with another
// product: pairs of codes take the place of 16-bit elements.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm80.h"

namespace jgg {

struct Fp8GemmSm89 {
  GemmSm80 gemm;  // k and distances along it in pairs of codes
  bool e5m2;      // A's codes, or e4m3
  // Scales lie as quantizing leaves them, the blocks of k of a line one after another, so many from
  // one line to the next. mm: a line of b's is 128 columns, and a weight has so many of them.
  const float *a_scales, *b_scales;
  int64_t a_scale_line, b_scale_line;
  int b_scale_lines;
};

// x (rows_x, K) times w (groups, N, K) to `out` (rows_x, N), contiguous all of them; `gemm` has
// these, its result's dtype and width, and the metadata already.
inline void CompleteMmSm89(Fp8GemmSm89& fp8, const void* x, const void* w, int64_t k) {
  GemmSm80& gemm = fp8.gemm;
  gemm.product = GemmSm80::Product::kMm;
  gemm.order = GemmSm80::Order::kSegments;  // of sizes
  gemm.a = x;
  gemm.b = w;
  gemm.k = gemm.a_line = gemm.b_line = k / 2;  // pairs
  gemm.b_group = gemm.n * gemm.b_line;
  gemm.a_width = gemm.b_width = 8;
  gemm.rows_y = gemm.rows_x;
  gemm.out_m = gemm.n;
  gemm.out_n = 1;
  fp8.a_scale_line = fp8.b_scale_line = (k + 127) / 128;
  fp8.b_scale_lines = static_cast<int>((gemm.n + 127) / 128);
}

// dy (N, rows) times x (K, rows) to `out` (groups, N, K), likewise, with m and n for N and K. Sizes
// are those of groups in pairs of rows.
inline void CompleteWgradSm89(Fp8GemmSm89& fp8, const void* dy, const void* x, int64_t rows) {
  GemmSm80& gemm = fp8.gemm;
  gemm.product = GemmSm80::Product::kWgrad;
  gemm.order = GemmSm80::Order::kSegments;
  gemm.a = dy;
  gemm.b = x;
  gemm.rows_x = gemm.rows_y = gemm.a_line = gemm.b_line = rows / 2;
  gemm.a_width = gemm.b_width = 8;
  gemm.out_group = gemm.m * gemm.n;
  gemm.out_m = gemm.n;
  gemm.out_n = 1;
  fp8.a_scale_line = fp8.b_scale_line = rows / 128;
}

cudaError_t LaunchFp8GemmSm89(cudaStream_t stream, const Fp8GemmSm89& fp8);

// The same in a build that may have no code for such GPUs.
inline cudaError_t RunFp8GemmSm89(cudaStream_t stream, const Fp8GemmSm89& fp8) {
#ifdef JGG_SM89
  return LaunchFp8GemmSm89(stream, fp8);
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

// Instances: gemm_sm89_instance.cu.
template <bool kWgrad, bool kE5M2>
cudaError_t LaunchFp8GemmSm89Instance(cudaStream_t stream, const Fp8GemmSm89& fp8);

}  // namespace jgg

// The Hopper kernel of products of two FP8 operands with scales for blocks of 128 k:
//   out[r, c] = sum_s a[r, s] b[c, s] sum_{k in block s} L[r, k] R[c, k]
// In mm L is rows of x, scaled row by row, and R columns of w, of which each block of 128 has one
// scale. In wgrad both are scaled line by line, and k are rows of a group, whose blocks are its
// own. It is grouped_mm's kernel with another product: pairs of e4m3 take the place of 16-bit
// elements, so a slice is 128 k, a block.
//
// A fast kernel is of operands with one scale for a matrix, of which L, or in wgrad R, may be e5m2.
// Tensor cores add up all k, and scales multiply the result:
//   out[r, c] = l r[matrix] sum_k L[r, k] R[c, k]
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"
#include "grouped_mm/mm.h"

namespace jgg {

// mm's scales of x: row r's of block s is data[r * line + s].
struct RowScales {
  const float* data;
  int64_t line;
};

// wgrad's scales: those of block s begin at data + s * block, so that a tile's are copied at once.
// R's lie in order. L's lie as threads read them: of every 64 rows lane q of four has rows 2 q and
// 2 q + 1 of each 8, next to each other, and four floats that nothing reads, which put the lanes'
// words into different banks.
struct BlockScales {
  const float* data;
  int64_t block;
};

constexpr int kStagedRows = 80;  // floats of 64 rows

// Scales of w: (G, ceil(N / 128), ceil(K / 128)).
struct TileScales {
  const float* data;
  int columns, blocks;  // ceil(N / 128), ceil(K / 128)
};

// A fast kernel's scales: L has one, and R one for each matrix of w; in wgrad it has one, too.
struct MatrixScales {
  const float *l, *r;
};

struct Fp8GemmSm90 {
  GemmSm90 gemm;                   // k and strides along it in pairs of elements
  bool fast;                       // then of the scales below, only those of matrices are read
  bool l_e5m2, r_e5m2;             // fast: codes of one of them may be; of R in wgrad alone
  MatrixScales matrix_scales;      // fast
  RowScales x_scales;              // mm
  TileScales w_scales;             // mm
  BlockScales l_scales, r_scales;  // wgrad
};

// `rows_first`: mm, whose results are of 16 bits, has rows as the instruction's M.
cudaError_t LaunchFp8GemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands,
                              bool rows_first);

// Fast kernels have columns first: with rows first they are no faster. Results are bfloat16 or
// float32.
cudaError_t LaunchFp8FastGemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8,
                                  const OperandsSm90& operands);

}  // namespace jgg

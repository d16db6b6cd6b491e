// Two products one after the other in one kernel: those of some tokens' experts. The first one's
// epilogue is a gated activation, and its result is the second one's x.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/processors.h"
#include "grouped_mm/gemm_sm90.h"

namespace jgg {

// What blocks count: TurnsOfUpAndDown zeros before the kernel runs. How many tiles blocks have
// taken, and for each row how many warps have stored their columns of the first product's tile that
// begins there.
constexpr int64_t TurnsOfUpAndDown(int64_t rows) { return 1 + rows; }

// Weights of 16 bits, in tiles of 32 rows.
struct DenseUpAndDownSm90 {
  GemmSm90 products[2];
  int32_t* turns;
};

// Whether tiles of both products keep all processors busy: those of the second are twice as wide as
// in a kernel of its own.
inline bool HasTilesOfBoth(const GemmSm90& down) {
  return std::min<int64_t>(down.rows_y, down.metadata.count) * down.n >=
         int64_t{2} * kH200Processors * 256;
}

// Encodes the tensor maps and launches; gemms are as for LaunchGemmSm90. In up_and_down_sm90.cu.
cudaError_t LaunchDenseUpAndDownSm90(cudaStream_t stream, DenseUpAndDownSm90& both,
                                     const OperandsSm90& up, const OperandsSm90& down);

}  // namespace jgg

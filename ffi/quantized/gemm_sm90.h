// The Hopper kernel of qmm: the tiles, schedule and epilogue of grouped_mm/gemm_sm90.h. Weights are
// decoded in the tensor cores' registers; they come in one of two layouts.
//
// Layout "linear" is that of QuantizedWeight, with lines along k. Its kernel takes x with columns
// in another order (jax_groupgemm/_quantized/ordered.py), as many as make whole 128. Of every 128,
// with d = 16 / bits, or 16 where bits do not divide 16, this column comes after that by a, b, j,
// e, the last of which runs fastest:
//   32 * j + 2 * d * a + d * e + b,   a < 16 / d, b < d, j < 4, e < 2.
// Where scales multiply sums of 32 k (device/scaled_lines.cuh) it comes by j, a, b, e.
//
// Layout "sm90": tiles of 64 columns (of the result) x 64 k, tiles of k fastest. Thread t of a
// warpgroup has row t / 32 * 16 + t % 32 / 4 of a tile and the one 8 below, and of every 16 k the
// four k, k + 1, k + 8, k + 9, k = t % 4 * 2. Its 32 codes are as many words as a code has bits, in
// pieces of 16, 8 and 4 bytes that lie beside those of the other threads; how words hold pairs of
// codes is in device/packed_format_sm90.cuh (e2m1, e4m3) and device/packed_codes.cuh (affine). The
// scales of its two rows lie beside each other, a word each (mxfp4: half a word); where there are
// two words for a row, all rows' second words follow all first ones; scales of 128 k (affine, fp8)
// are those of two tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include "common/processors.h"
#include "grouped_mm/gemm_sm90.h"
#include "quantized/plan.h"
#include "quantized/quantized.h"

namespace jgg {

// A product of low rank that is added to the sums of a tile: rows (T, rank) @ weights (G, rank, N),
// of x's type. Layout "sm90", tiles of at least kLeastAdapterTile rows.
struct AdapterSm90 {
  const void *rows, *weights;
  int64_t rank;  // 0: there is none
};

// A product with a quantized weight, as a handler describes it in either layout.
struct QmmSm90 {
  MmSm90 mm;
  const void* scales;
  GlobalScale global_scale;
  AdapterSm90 adapter;
};

// The kernel's argument; a launch uses one of the layouts.
struct QuantizedGemmSm90 {
  GemmSm90 gemm;  // L (x) and the result; R is not used
  const void* scales;
  GlobalScale global_scale;
  float unit;           // that sums are of: set where the tile is chosen, as is the next
  bool asks_for_small;  // device/registers_sm90.cuh
  PackedCodesSm90 packed;
  // Layout "linear". Its members are no struct of their own: a kernel reads some of them together,
  // which the compiler does not do across a struct's beginning.
  CUtensorMap codes_map;
  const void* biases;
  int scale_line;   // bytes of a line's scales
  int elements;     // of a line; of a column where W is quantized along N
  int scale_shift;  // a scale is of 2^shift k
  // ... in blocks: rows and columns that share a scale, lines of scales of a matrix.
  int rows_each, columns_each, scale_lines;
  const float* x;  // device/scaled_lines_sm90.cuh: rows of float32
  // device/scaled_tiles_sm90.cuh: planes of x, and its sums of 32 k, (K / 128, T), or of 16 k,
  // (K / 64, T), where groups have 16; K is filled up to whole 128.
  int planes;
  const float4* x_sums;
  // device/adapter_sm90.cuh; 0 without an adapter. gemm.rest_maps.r has the maps of its rows and of
  // its weights.
  int adapter_rank;
};

QuantizedGemmSm90 MakeQuantizedGemmSm90(const QmmSm90& qmm);

// Whether tiles of 16 rows are for a product: few matrices have more rows, and there are four tiles
// for each multiprocessor of an H200.
inline bool HasSixteens(const GemmSm90& gemm, const rules::QmmPlanSm90& plan) {
  constexpr int64_t kMostTypical = 5;
  const Epilogue& epilogue = gemm.epilogue;
  if (plan.way != rules::QmmWay::kWarps || plan.parts != 1 || gemm.n % 128 != 0) return false;
  if (!IsGated(epilogue.activation) && epilogue.Any()) return false;
  const int64_t rows = gemm.rows_y, segments = gemm.metadata.count;
  return rules::RowsPerSegment(rows, segments) <= kMostTypical &&
         std::min(rows, segments) * gemm.n >= int64_t{4} * kH200Processors * 256;
}

// What TMA has to know of an adapter.
struct AdapterSpecsSm90 {
  TensorMapSpec rows, weights;
};
AdapterSpecsSm90 DescribeAdapterSm90(const QmmSm90& qmm, DType dtype);
cudaError_t EncodeAdapterSm90(const QmmSm90& qmm, DType dtype, QuantizedGemmSm90* quantized);

// launch(a constant of bfloat16 or of float16): the type of x in layout "sm90".
template <typename Launch>
cudaError_t DispatchHalfSm90(DType dtype, Launch launch) {
  if (dtype == DType::kBF16) return launch(std::integral_constant<DType, DType::kBF16>{});
  return launch(std::integral_constant<DType, DType::kF16>{});
}

// Encode the tensor maps and launch, as the plan says. PlanQmmProblem has passed it. Layout "sm90".
cudaError_t LaunchPackedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const rules::QmmPlanSm90& plan,
                                 const OperandsSm90& operands);

// x (T, N) @ W (N, K), W quantized along K, in either layout: quantized.gemm has K for n, and N for
// k.
cudaError_t LaunchTransposedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const Coding& coding, const rules::QmmPlanSm90& plan,
                                     const OperandsSm90& operands);

// Layout "linear"; operands.r are the codes, in units of two bytes.
cudaError_t LaunchLinearGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                 const Coding& coding, const rules::QmmPlanSm90& plan,
                                 const OperandsSm90& operands);

// Instances: format_sm90_instance.cu.
template <Mode kMode, int kBits>
cudaError_t LaunchPackedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const rules::QmmPlanSm90& plan, const OperandsSm90& operands);
template <Mode kMode, int kBits>
cudaError_t LaunchTransposedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                         const rules::QmmPlanSm90& plan,
                                         const OperandsSm90& operands);
template <Mode kMode, int kBits>
cudaError_t LaunchLinearInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const rules::QmmPlanSm90& plan, const OperandsSm90& operands);

}  // namespace jgg

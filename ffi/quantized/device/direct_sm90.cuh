// Products of a few rows in all with weights in layout "sm90": a decode step of a token or two. The
// kernel of tiles (gemm_sm90.cuh) takes 10 us for weights that memory delivers in 2: few of its
// blocks have a tile, and each has to begin, fill a ring and end. Here as many blocks as possible
// have something to read: each has 16 columns and up to 8 rows of one group. With more rows of one
// matrix a block has 16 of them, and perhaps 16 columns more.
#pragma once

#include <cstdint>

#include "grouped_mm/mm.h"
#include "quantized/device/direct_product_sm90.cuh"
#include "quantized/device/direct_rows.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

struct DirectGemmSm90 {
  Metadata metadata;  // kSizes
  Epilogue epilogue;  // without existing_out and a second result
  const char* x;      // bfloat16
  void* out;
  DType out_dtype;
  int rows, n, groups;  // n: of w
  const void* scales;
  GlobalScale global_scale;
  PackedCodesSm90 packed;
};

// Finish::Store stores a result: the sum of weight `weight`, and that of what a gate lets through.
// kEights: of rows of a block, more than one where there is one matrix. kPairs: a block has the
// columns n / 2 behind its own, too.
template <typename Weights, bool kGated, typename Finish, int kEights = 1, bool kPairs = false>
__global__ void __launch_bounds__(32 * kDirectWarps, 3)
    DirectGemmSm90Kernel(const __grid_constant__ DirectGemmSm90 gemm) {
  static_assert(!kGated || !kPairs);
  constexpr int kBlocks = kGated || kPairs ? 2 : 1;
  using Product = DirectProduct<Weights, kBlocks, kEights>;
  __shared__ typename Product::SharedMemory memory;
  DirectRows rows;
  if (gemm.metadata.HasEntryOfEach(1)) {
    // Nothing waits for the size of the only group.
    constexpr int kRows = kEights * kDirectRows;
    const int first = kRows * blockIdx.y, size = gemm.metadata.data[0];
    rows = {first, min(kRows, gemm.rows - first), size - first, 0};
  } else {
    rows = FindDirectRows(gemm.metadata, gemm.groups, gemm.rows, blockIdx.y);
    if (rows.loaded == 0) return;
  }
  const int tile_scales = Weights::TileScales(gemm.packed), k_tiles = gemm.packed.k_tiles;
  PackedColumn columns[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    columns[b] = Weights::ColumnOf(gemm.packed, gemm.scales, max(rows.weight, 0),
                                   blockIdx.x / 4 + b * (gemm.n / 128));
  }
  Product::Multiply(
      memory, tile_scales, rows.weight < 0 ? 0 : k_tiles, [](int tile) { return tile; },
      [&](int, int b) { return columns[b]; },
      [&](int tile, int row) -> const char* {
        if (row >= rows.loaded) return nullptr;
        return gemm.x + (static_cast<int64_t>(rows.first + max(row, 0)) * k_tiles + tile) * 128;
      });
  __syncthreads();
  const int column = 16 * blockIdx.x + Product::Column();
  if (threadIdx.x >= 128) return;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int row = kDirectRows * e + Product::Row(), at = rows.first + row;
    if (row >= rows.loaded) return;
    if (row >= rows.inside) {
      if (gemm.metadata.clears_rest) {
        Finish::StoreZero(gemm, at, column, kGated);
        if (kPairs) Finish::StoreZero(gemm, at, column + gemm.n / 2, false);
      }
      continue;
    }
    float values[2] = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      values[b] = Product::Sum(memory, b, e);
      if (gemm.global_scale.data != nullptr) {
        values[b] *= gemm.global_scale.At(rows.weight, column + b * (gemm.n / 2));
      }
    }
    Finish::Store(gemm, rows.weight, at, column, values[0], values[1], kGated);
    if (kPairs) {
      Finish::Store(gemm, rows.weight, at, column + gemm.n / 2, values[1], 0.0f, false);
    }
  }
}

}  // namespace jgg::device

// mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
// The simplest kernel that is right for every shape: one block per 64 x 64 tile of the result,
// which adds up the segments that reach it, in order. No two blocks write one element.

#include "grouped_mm/mm_sm80.h"

#include "common/dispatch.h"
#include "grouped_mm/device/tile.cuh"

namespace jgg {
namespace {

using namespace device;

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) MmKernel(MmArgs args, int64_t column_tiles) {
  __shared__ Slices slices;
  const Position at;
  const int64_t row_tile = (blockIdx.x / column_tiles) * kTile;
  const int64_t column_tile = (blockIdx.x % column_tiles) * kTile;
  const In* x = static_cast<const In*>(args.x);
  const In* w = static_cast<const In*>(args.w);
  float total[kPerThread][kPerThread] = {};

  auto reaches_tile = [&](const Segment& s) {
    return s.length > 0 && s.weight >= 0 && s.weight < args.groups &&
           s.y_start < row_tile + kTile && int64_t{s.y_start} + s.length > row_tile;
  };
  ForEachSegment(args.segments, args.num_segments, reaches_tile, [&](const Segment s) {
    const In* weight = w + s.weight * args.w_group;
    // Rows of the tile that are rows of this segment.
    const int64_t begin = s.y_start - row_tile;
    const int64_t end = begin + s.length;
    auto load_x = [&](int row, int64_t k) -> float {
      const bool inside = row >= begin && row < end && k < args.k;
      const int64_t source = s.x_start + (row - begin);
      return inside ? static_cast<float>(x[source * args.x_row + k * args.x_k]) : 0.0f;
    };
    auto load_w = [&](int64_t k, int64_t column) -> float {
      const bool inside = k < args.k && column < args.n;
      return inside ? static_cast<float>(weight[k * args.w_k + column * args.w_n]) : 0.0f;
    };
    float acc[kPerThread][kPerThread] = {};
    for (int64_t k0 = 0; k0 < args.k; k0 += kSlice) {
      FillSlice(slices.a, args.x_k == 1, [&](int k, int row) { return load_x(row, k0 + k); });
      FillSlice(slices.b, args.w_k == 1,
                [&](int k, int column) { return load_w(k0 + k, column_tile + column); });
      __syncthreads();
      MultiplyAdd(acc, slices, at);
      __syncthreads();
    }
    // Only to its own rows: for the others 0 * w may be NaN.
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = at.row0 + 16 * i;
      if (row < begin || row >= end) continue;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) total[i][j] += acc[i][j];
    }
  });

  Out* out = static_cast<Out*>(args.out);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t row = row_tile + at.row0 + 16 * i;
      const int64_t column = column_tile + at.column0 + 16 * j;
      if (row < args.rows && column < args.n) {
        out[row * args.out_row + column * args.out_n] = static_cast<Out>(total[i][j]);
      }
    }
  }
}

}  // namespace

std::optional<std::string> mm_sm80_unsupported(const MmArgs& args, int compute_capability) {
  if (compute_capability < 80) {
    return "needs compute capability 8.0 or newer, got " + std::to_string(compute_capability);
  }
  return std::nullopt;
}

cudaError_t mm_sm80(cudaStream_t stream, const MmArgs& args) {
  const int64_t row_tiles = (args.rows + kTile - 1) / kTile;
  const int64_t column_tiles = (args.n + kTile - 1) / kTile;
  if (row_tiles * column_tiles == 0) return cudaSuccess;
  if (row_tiles * column_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  return DispatchFloat(args.dtype, [&](auto in) {
    return DispatchFloat(args.out_dtype, [&](auto out) {
      MmKernel<decltype(in), decltype(out)>
          <<<static_cast<unsigned>(row_tiles * column_tiles), kThreads, 0, stream>>>(args,
                                                                                     column_tiles);
      return cudaGetLastError();
    });
  });
}

}  // namespace jgg

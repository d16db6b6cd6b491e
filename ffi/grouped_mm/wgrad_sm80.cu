// wgrad: out[weight_s] += x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
// The simplest kernel that is right for every shape: one block per 64 x 64 tile of one matrix of
// the result, which adds up the segments that name it, in order.

#include "grouped_mm/wgrad_sm80.h"

#include "common/dispatch.h"
#include "grouped_mm/device/tile.cuh"

namespace jgg {
namespace {

using namespace device;

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    WgradKernel(WgradArgs args, int64_t a_tiles, int64_t b_tiles) {
  __shared__ Slices slices;
  const Position at;
  const int64_t group = blockIdx.x / (a_tiles * b_tiles);
  const int64_t a_tile = blockIdx.x / b_tiles % a_tiles * kTile;
  const int64_t b_tile = blockIdx.x % b_tiles * kTile;
  const In* x = static_cast<const In*>(args.x);
  const In* y = static_cast<const In*>(args.y);
  float acc[kPerThread][kPerThread] = {};

  auto add_segment = [&](const Segment s) {
    // Rows past the segment's end are zeros on both sides: NaN * 0 is NaN.
    auto load_x = [&](int64_t row, int64_t a) -> float {
      const bool inside = row < s.length && a < args.a;
      return inside ? static_cast<float>(x[(s.x_start + row) * args.x_row + a * args.x_a]) : 0.0f;
    };
    auto load_y = [&](int64_t row, int64_t b) -> float {
      const bool inside = row < s.length && b < args.b;
      return inside ? static_cast<float>(y[(s.y_start + row) * args.y_row + b * args.y_b]) : 0.0f;
    };
    for (int64_t row0 = 0; row0 < s.length; row0 += kSlice) {
      FillSlice(slices.a, args.x_row == 1,
                [&](int row, int a) { return load_x(row0 + row, a_tile + a); });
      FillSlice(slices.b, args.y_row == 1,
                [&](int row, int b) { return load_y(row0 + row, b_tile + b); });
      __syncthreads();
      MultiplyAdd(acc, slices, at);
      __syncthreads();
    }
  };
  if (args.own_weight) {
    add_segment(args.segments[group]);
  } else {
    auto names_group = [&](const Segment& s) { return s.weight == group && s.length > 0; };
    ForEachSegment(args.segments, args.num_segments, names_group, add_segment);
  }

  Out* out = static_cast<Out*>(args.out) + group * args.a * args.b;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t a = a_tile + at.row0 + 16 * i;
      const int64_t b = b_tile + at.column0 + 16 * j;
      if (a < args.a && b < args.b) out[a * args.b + b] = static_cast<Out>(acc[i][j]);
    }
  }
}

}  // namespace

std::optional<std::string> wgrad_sm80_unsupported(const WgradArgs& args, int compute_capability) {
  if (compute_capability < 80) {
    return "needs compute capability 8.0 or newer, got " + std::to_string(compute_capability);
  }
  return std::nullopt;
}

cudaError_t wgrad_sm80(cudaStream_t stream, const WgradArgs& args) {
  const int64_t a_tiles = (args.a + kTile - 1) / kTile;
  const int64_t b_tiles = (args.b + kTile - 1) / kTile;
  const int64_t blocks = args.groups * a_tiles * b_tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return DispatchFloat(args.dtype, [&](auto in) {
    return DispatchFloat(args.out_dtype, [&](auto out) {
      WgradKernel<decltype(in), decltype(out)>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, a_tiles, b_tiles);
      return cudaGetLastError();
    });
  });
}

}  // namespace jgg

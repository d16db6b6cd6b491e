// Everything before the products: each group's problem, swizzled scales, and the rows and matrices
// of out that no product writes. It runs on any architecture, and only Blackwell needs it.
#include <algorithm>

#include "cute/tensor.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "nvfp4/device/groups.cuh"
#include "nvfp4/device/swizzle.cuh"
#include "nvfp4/gemm_sm100.h"

namespace jgg::nvfp4 {

using ScaleConfig = cutlass::detail::Sm1xxBlockScaledConfig<kScaleElements>;
using ScaleLayout = decltype(ScaleConfig::deduce_layoutSFA());
using Shape = cute::Shape<int, int, int>;
static_assert(sizeof(Shape) == kShapeBytes);
static_assert(sizeof(ScaleLayout) == kScaleLayoutBytes);
static_assert(sizeof(int64_t) == kStrideBytes);

// Arrays in the workspace.
struct Groups {
  Shape* shapes;
  const uint8_t **a, **b, **scales_a, **scales_b;
  uint8_t** out;
  int64_t *stride_a, *stride_b, *stride_out;
  ScaleLayout *layout_a, *layout_b;
  int32_t *starts, *tiles;

  Groups(const Workspace& at, uint8_t* base)
      : shapes(reinterpret_cast<Shape*>(base + at.shapes)),
        a(reinterpret_cast<const uint8_t**>(base + at.a)),
        b(reinterpret_cast<const uint8_t**>(base + at.b)),
        scales_a(reinterpret_cast<const uint8_t**>(base + at.scales_a)),
        scales_b(reinterpret_cast<const uint8_t**>(base + at.scales_b)),
        out(reinterpret_cast<uint8_t**>(base + at.out)),
        stride_a(reinterpret_cast<int64_t*>(base + at.stride_a)),
        stride_b(reinterpret_cast<int64_t*>(base + at.stride_b)),
        stride_out(reinterpret_cast<int64_t*>(base + at.stride_out)),
        layout_a(reinterpret_cast<ScaleLayout*>(base + at.layout_a)),
        layout_b(reinterpret_cast<ScaleLayout*>(base + at.layout_b)),
        starts(reinterpret_cast<int32_t*>(base + at.starts)),
        tiles(reinterpret_cast<int32_t*>(base + at.tiles)) {}
};

// Operands as bytes, their scales swizzled.
struct Bases {
  const uint8_t *a, *b, *scales_a, *scales_b;
  uint8_t* out;
};

__global__ void __launch_bounds__(device::kScanThreads)
    GroupsKernel(Product product, const int32_t* sizes, Bases bases, Groups groups) {
  __shared__ int64_t tokens[device::kScanThreads], tiles[device::kScanThreads];
  const int thread = threadIdx.x;
  const device::GroupScan scan{sizes, product.groups, product.tokens, product.unit(),
                               product.most_tiles()};
  tokens[thread] = device::SumSizes(scan, thread);
  __syncthreads();
  const int64_t tokens_before = device::SumBefore(scan, tokens, thread);
  tiles[thread] = device::SumTiles(scan, thread, tokens_before);
  __syncthreads();
  const int64_t tiles_before = device::SumBefore(scan, tiles, thread);
  device::WriteGroups(product, scan, thread, tokens_before, tiles_before, groups.starts,
                      groups.tiles, [&](int g, const GroupProblem& group) {
                        groups.shapes[g] = cute::make_shape(group.m, group.n, group.k);
                        groups.a[g] = bases.a + group.a;
                        groups.b[g] = bases.b + group.b;
                        groups.scales_a[g] = bases.scales_a + group.scales_a;
                        groups.scales_b[g] = bases.scales_b + group.scales_b;
                        groups.out[g] = bases.out + group.out;
                        groups.stride_a[g] = groups.stride_b[g] = product.k;
                        groups.stride_out[g] = product.n;
                        const auto shape = cute::make_shape(group.m, group.n, group.k, 1);
                        groups.layout_a[g] = ScaleConfig::tile_atom_to_shape_SFA(shape);
                        groups.layout_b[g] = ScaleConfig::tile_atom_to_shape_SFB(shape);
                      });
}

// Tiles of A's scales and then of B's, a warp each.
struct Swizzle {
  const uint8_t* from[2];
  uint8_t* to[2];
  int64_t tiles[2];
};

inline constexpr int kSwizzleWarps = 8;

__global__ void __launch_bounds__(32 * kSwizzleWarps)
    SwizzleKernel(Product product, Swizzle swizzle, const int32_t* starts, const int32_t* tiles) {
  int64_t index = int64_t{blockIdx.x} * kSwizzleWarps + threadIdx.x / 32;
  const bool b = index >= swizzle.tiles[0];
  if (b) index -= swizzle.tiles[0];
  if (b && index >= swizzle.tiles[1]) return;
  const int64_t k_tiles = product.k_tiles();
  const device::ScaleTile tile =
      device::FindScaleTile(product, b, starts, tiles, index / k_tiles, index % k_tiles);
  if (tile.rows == 0) return;
  const int lane = threadIdx.x % 32;
  uint32_t words[4];
  device::SwizzleLane(b ? swizzle.from[1] : swizzle.from[0], CeilDiv(product.k, kScaleElements),
                      tile, lane, words);
  auto* to = reinterpret_cast<uint4*>((b ? swizzle.to[1] : swizzle.to[0]) + tile.to * kTileBytes);
  to[lane] = make_uint4(words[0], words[1], words[2], words[3]);
}

// grouped_mm: zeros in the rows of no group.
__global__ void ZeroRowsKernel(Product product, const int32_t* starts, uint8_t* out) {
  const int64_t line = int64_t{product.n} * product.out_size / 16;
  const int64_t end = product.tokens * line, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = starts[product.groups] * line + first; i < end; i += step) {
    reinterpret_cast<uint4*>(out)[i] = uint4{};
  }
}

// grouped_wgrad: beta * out, or zeros, in the matrices of groups without tokens. A block has one
// matrix, and every gridDim.x-th piece of it.
__global__ void EmptyMatricesKernel(Product product, const int32_t* tiles, const float* beta,
                                    float* out) {
  const int64_t size = int64_t{product.m} * product.n;
  for (int64_t g = blockIdx.y; g < product.groups; g += gridDim.y) {
    if (tiles[g + 1] != tiles[g]) continue;
    const float factor = beta == nullptr ? 0 : beta[g];
    if (factor == 1) continue;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
         i += int64_t{gridDim.x} * blockDim.x) {
      float& value = out[g * size + i];
      value = factor == 0 ? 0 : factor * value;
    }
  }
}

cudaError_t PrepareGroups(cudaStream_t stream, const GemmSm100& gemm, const Workspace& at,
                          uint8_t* base) {
  const Product& product = gemm.product;
  const Groups groups(at, base);
  const auto bytes = [](const void* data) { return static_cast<const uint8_t*>(data); };
  const Bases bases{bytes(gemm.a.codes), bytes(gemm.b.codes), base + at.swizzled_a,
                    base + at.swizzled_b, static_cast<uint8_t*>(gemm.out)};
  GroupsKernel<<<1, device::kScanThreads, 0, stream>>>(product, gemm.sizes, bases, groups);
  if (cudaError_t error = cudaGetLastError()) return error;

  const int64_t tiles_a = product.scale_bytes(false) / kTileBytes;
  const int64_t tiles_b = product.scale_bytes(true) / kTileBytes;
  const Swizzle swizzle{{bytes(gemm.a.scales), bytes(gemm.b.scales)},
                        {base + at.swizzled_a, base + at.swizzled_b},
                        {tiles_a, tiles_b}};
  const int64_t blocks = CeilDiv(tiles_a + tiles_b, kSwizzleWarps);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  SwizzleKernel<<<static_cast<unsigned>(blocks), 32 * kSwizzleWarps, 0, stream>>>(
      product, swizzle, groups.starts, groups.tiles);
  if (cudaError_t error = cudaGetLastError()) return error;

  // Usually these kernels have nothing to fill, so a grid has no more blocks than run at a time.
  if (product.ragged_k) {
    const dim3 grid(std::max(1, kMostMultiprocessors / std::min(product.groups, 64)),
                    std::min(product.groups, 64));
    EmptyMatricesKernel<<<grid, 256, 0, stream>>>(product, groups.tiles, gemm.beta,
                                                  static_cast<float*>(gemm.out));
  } else {
    ZeroRowsKernel<<<kMostMultiprocessors, 256, 0, stream>>>(product, groups.starts, bases.out);
  }
  return cudaGetLastError();
}

}  // namespace jgg::nvfp4

// The Blackwell kernels of NVFP4 products read shapes, swizzled scales and a workspace: this says
// where they lie. It is plain C++, which tests/lib/nvfp4_layout.cc tries on the host.
#pragma once

#include <cstdint>

#include "common/grouped_sm100.h"
#include "quantized/device/instructions.cuh"

namespace jgg::nvfp4 {

// A tile of swizzled scales: 128 rows by 4 scales, that is 64 elements of k.
inline constexpr int kScaleElements = 16;
inline constexpr int kTileRows = 128;
inline constexpr int kTileScales = 4;
inline constexpr int kTileK = kScaleElements * kTileScales;
inline constexpr int kTileBytes = kTileRows * kTileScales;

JGG_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Byte of the scale of row r and block s within its tile.
JGG_HOST_DEVICE constexpr int ByteInTile(int r, int s) {
  return r % 32 * 16 + r % kTileRows / 32 * 4 + s % kTileScales;
}

// Both products are out_g = alpha_g A_g B_g^T with A_g (m_g, k_g) and B_g (n, k_g), k contiguous:
//   grouped_mm     A = x (T, K), B = w (G, N, K): a group has rows of A, m_g of them
//   grouped_wgrad  A = dy (N, P), B = x (K, P): a group has columns of both, k_g of them; each
//                  begins at a multiple of 64, where the one before it ends
struct Product {
  bool ragged_k;     // grouped_wgrad
  int32_t groups;    //
  int32_t tokens;    // T; sizes are cut there
  int32_t m;         // grouped_wgrad: N
  int32_t n;         // grouped_mm: N; grouped_wgrad: K
  int32_t k;         // elements of a line of A and B: K, or P
  int32_t out_size;  // bytes of an element of out

  // Each group is padded to whole tiles: of rows, or of k.
  JGG_HOST_DEVICE int unit() const { return ragged_k ? kTileK : kTileRows; }
  JGG_HOST_DEVICE int64_t k_tiles() const { return CeilDiv(k, kTileK); }
  // The most tiles that groups have together, whatever their sizes.
  JGG_HOST_DEVICE int64_t most_tiles() const {
    const int64_t groups_with_tokens = groups < tokens ? groups : tokens;
    return ragged_k ? k / kTileK : (tokens + groups_with_tokens * (kTileRows - 1)) / kTileRows;
  }
  // Tiles of rows of the swizzled scales of A and of B.
  JGG_HOST_DEVICE int64_t row_tiles(bool b) const {
    if (ragged_k) return CeilDiv(b ? n : m, kTileRows);
    return b ? groups * CeilDiv(n, kTileRows) : most_tiles();
  }
  JGG_HOST_DEVICE int64_t scale_bytes(bool b) const {
    return row_tiles(b) * k_tiles() * kTileBytes;
  }
};

// The product of one group: its shape, zeros where it has none, and the bytes at which it begins in
// A, B, their swizzled scales and out.
struct GroupProblem {
  int32_t m, n, k;
  int64_t a, b, scales_a, scales_b, out;
};

// The product of group g, which has `size` tokens from `start` on, and `tiles` tiles from `tile`
// on.
JGG_HOST_DEVICE GroupProblem MakeGroupProblem(const Product& p, int g, int start, int size,
                                              int64_t tile, int64_t tiles) {
  GroupProblem group{};
  if (p.ragged_k) {
    group.a = group.b = tile * (kTileK / 2);
    group.scales_a = p.row_tiles(false) * tile * kTileBytes;
    group.scales_b = p.row_tiles(true) * tile * kTileBytes;
    group.out = int64_t{g} * p.m * p.n * p.out_size;
    // NOTE: never k = 0 with rows and columns: CUTLASS 4.2 stores what no product has written.
    if (tiles > 0) group.m = p.m, group.n = p.n, group.k = static_cast<int32_t>(tiles * kTileK);
    return group;
  }
  group.a = int64_t{start} * (p.k / 2);
  group.b = int64_t{g} * p.n * (p.k / 2);
  group.scales_a = tile * p.k_tiles() * kTileBytes;
  group.scales_b = g * CeilDiv(p.n, kTileRows) * p.k_tiles() * kTileBytes;
  group.out = int64_t{start} * p.n * p.out_size;
  if (size > 0) group.m = size, group.n = p.n, group.k = p.k;
  return group;
}

using sm100::kMostMultiprocessors;
using sm100::kShapeBytes;
using sm100::kStrideBytes;
using sm100::kTensorMapBytes;
inline constexpr int kScaleLayoutBytes = 20;  // a cute type, see prepare_sm100.cu

struct Workspace {
  int64_t shapes, a, b, scales_a, scales_b, out;  // (G,)
  int64_t stride_a, stride_b, stride_out;         // (G,)
  int64_t layout_a, layout_b;                     // (G,)
  int64_t starts, tiles;                          // int32 (G + 1,)
  int64_t tensor_maps, swizzled_a, swizzled_b;    //
  int64_t bytes;

  explicit Workspace(const Product& p) {
    sm100::Arena arena;
    shapes = arena.Take(p.groups * int64_t{kShapeBytes});
    for (int64_t* pointers : {&a, &b, &scales_a, &scales_b, &out})
      *pointers = arena.Take(p.groups * 8L);
    for (int64_t* strides : {&stride_a, &stride_b, &stride_out}) {
      *strides = arena.Take(p.groups * int64_t{kStrideBytes});
    }
    for (int64_t* layouts : {&layout_a, &layout_b}) {
      *layouts = arena.Take(p.groups * int64_t{kScaleLayoutBytes});
    }
    for (int64_t* scan : {&starts, &tiles}) *scan = arena.Take((p.groups + 1) * 4L);
    tensor_maps = arena.Take(kTensorMapBytes);
    swizzled_a = arena.Take(p.scale_bytes(false));
    swizzled_b = arena.Take(p.scale_bytes(true));
    bytes = arena.bytes();
  }
};

}  // namespace jgg::nvfp4

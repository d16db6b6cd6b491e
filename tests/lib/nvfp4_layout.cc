// ffi/nvfp4/layout.h and device/ on the host, for test_nvfp4_layout.py.
#include <cstring>
#include <vector>

#include "nvfp4/device/groups.cuh"
#include "nvfp4/device/swizzle.cuh"
#include "nvfp4/layout.h"
#include "nvfp4/rules.h"
#ifdef JGG_CUTE
#include "cute/tensor.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#endif

using namespace jgg::nvfp4;
using namespace jgg::nvfp4::device;

// product: the members of Product, in order.
static Product ToProduct(const int32_t* p) {
  return Product{p[0] != 0, p[1], p[2], p[3], p[4], p[5], p[6]};
}

// starts, tiles (G + 1,); problems (G, 8): the members of GroupProblem.
extern "C" void groups(const int32_t* p, const int32_t* sizes, int32_t* starts, int32_t* tiles,
                       int64_t* problems) {
  const Product product = ToProduct(p);
  const GroupScan scan{sizes, product.groups, product.tokens, product.unit(), product.most_tiles()};
  std::vector<int64_t> tokens(kScanThreads), own_tiles(kScanThreads);
  for (int t = 0; t < kScanThreads; ++t) tokens[t] = SumSizes(scan, t);
  for (int t = 0; t < kScanThreads; ++t) {
    own_tiles[t] = SumTiles(scan, t, SumBefore(scan, tokens.data(), t));
  }
  for (int t = 0; t < kScanThreads; ++t) {
    WriteGroups(product, scan, t, SumBefore(scan, tokens.data(), t),
                SumBefore(scan, own_tiles.data(), t), starts, tiles,
                [&](int g, const GroupProblem& group) {
                  const int64_t members[] = {group.m, group.n,        group.k,        group.a,
                                             group.b, group.scales_a, group.scales_b, group.out};
                  std::memcpy(problems + 8 * g, members, sizeof(members));
                });
  }
}

// Every tile of A's or B's scales, as SwizzleKernel makes them.
extern "C" void swizzle(const int32_t* p, int b, const int32_t* starts, const int32_t* tiles,
                        const uint8_t* from, uint8_t* to) {
  const Product product = ToProduct(p);
  for (int64_t row_tile = 0; row_tile < product.row_tiles(b); ++row_tile) {
    for (int64_t k_tile = 0; k_tile < product.k_tiles(); ++k_tile) {
      const ScaleTile tile = FindScaleTile(product, b, starts, tiles, row_tile, k_tile);
      if (tile.rows == 0) continue;
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t words[4];
        SwizzleLane(from, CeilDiv(product.k, kScaleElements), tile, lane, words);
        std::memcpy(to + tile.to * kTileBytes + 16 * lane, words, 16);
      }
    }
  }
}

extern "C" int byte_in_tile(int r, int s) { return ByteInTile(r, s); }

extern "C" int64_t scale_bytes(const int32_t* p, int b) { return ToProduct(p).scale_bytes(b); }

// Where the parts of the workspace begin; its size.
extern "C" int64_t workspace(const int32_t* p, int64_t* offsets) {
  const Workspace at(ToProduct(p));
  const int64_t members[] = {at.shapes,     at.a,           at.b,          at.scales_a,
                             at.scales_b,   at.out,         at.stride_a,   at.stride_b,
                             at.stride_out, at.layout_a,    at.layout_b,   at.starts,
                             at.tiles,      at.tensor_maps, at.swizzled_a, at.swizzled_b};
  std::memcpy(offsets, members, sizeof(members));
  return at.bytes;
}

extern "C" void shape_problem(const int32_t* p, char* text, int size) {
  std::strncpy(text, ShapeProblem(ToProduct(p)).value_or("").c_str(), size - 1);
}

#ifdef JGG_CUTE
// CuTe's offset of the scale of element (row, k) of A, or of B, and the size of the layout.
extern "C" int64_t cute_offset(int m, int n, int k, int b, int row, int column, int64_t* size) {
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<kScaleElements>;
  const auto shape = cute::make_shape(m, n, k, 1);
  const auto answer = [&](const auto& layout) {
    static_assert(sizeof(layout) == kScaleLayoutBytes);
    *size = cute::cosize(layout);
    return static_cast<int64_t>(layout(row, column, 0));
  };
  return b ? answer(Config::tile_atom_to_shape_SFB(shape))
           : answer(Config::tile_atom_to_shape_SFA(shape));
}
#endif

// ffi/quantized/device/scaled_x_sm90.cuh on the host, for test_scaled_x.py: a warp after the other.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "quantized/device/scaled_x_sm90.cuh"

using namespace jgg;

struct Problem {
  const float* x;  // (8, n)
  const char *codes, *scales;
  float* out;  // (8, k), to which sums are added
  int32_t n, k, tile_scales, half_scales, float_scales, tiles_share, tile_groups;
};

// Boxes of 32 n as a copy of whole lines puts them, swizzled.
static std::vector<float> Boxes(const Problem& p, int slice) {
  const int rows = 8;
  std::vector<float> boxes(2 * rows * 32);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < 64; ++i) {
      const int piece = (i % 32 / 4) ^ (row % 8);
      boxes[(i / 32 * rows + row) * 32 + piece * 4 + i % 4] = p.x[row * p.n + 64 * slice + i];
    }
  }
  return boxes;
}

template <typename Tiles, int kGroups>
static void RunTile(const Problem& p, const PackedCodesSm90& packed, int column, int tile) {
  std::vector<std::vector<float>> boxes;
  for (int slice = 0; slice < p.n / 64; ++slice) boxes.push_back(Boxes(p, slice));
  Run(1, 128, [&] {
    device::ScaledXProduct<Tiles, kGroups> product(packed);
    for (int slice = 0; slice < p.n / 64; ++slice) {
      const int64_t first = int64_t{slice} * packed.k_tiles + column;
      product.Multiply(reinterpret_cast<const char*>(boxes[slice].data()),
                       p.codes + first * Tiles::kTileCodes,
                       p.scales + first * Tiles::TileScales(packed), tile);
    }
    const auto& sums = product.Finish();
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 16; ++i) {
      const int j = i % 4, row = lane % 4 * 2 + j % 2;
      const int at = 64 * (column + tile) + i / 4 * 16 + lane / 4 + j / 2 * 8;
      p.out[row * p.k + at] += sums[i / 4][j];
    }
  });
}

template <typename Tiles>
static void RunTiles(const Problem& p, const PackedCodesSm90& packed) {
  for (int column = 0; column < packed.k_tiles; column += 2) {
    for (int tile = 0; tile < 2 && column + tile < packed.k_tiles; ++tile) {
      if (packed.tile_groups == 1) RunTile<Tiles, 1>(p, packed, column, tile);
      if (packed.tile_groups == 2) RunTile<Tiles, 2>(p, packed, column, tile);
      if (packed.tile_groups == 4) RunTile<Tiles, 4>(p, packed, column, tile);
    }
  }
}

extern "C" int scaled_x(const Problem* problem, int mode, int bits) {
  const Problem& p = *problem;
  PackedCodesSm90 packed{p.codes, p.n / 64, p.k / 64, p.tile_scales};
  packed.half_scales = p.half_scales != 0;
  packed.float_scales = p.float_scales != 0;
  packed.tiles_share = p.tiles_share != 0;
  packed.tile_groups = p.tile_groups;
  return Formats::Dispatch(static_cast<Mode>(mode), bits, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kScale == ScaleType::kScaleAndBias ||
                  Format::kScale == ScaleType::kFloat32) {
      using Tiles = device::PackedTiles<Format::kMode, Format::kBits>;
      return RunTiles<Tiles>(p, packed), 0;
    } else {
      return 1;
    }
  });
}

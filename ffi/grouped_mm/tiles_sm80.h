// Which tile the generic kernel takes for 16-bit elements where segments are not short: a rule of
// static shapes and of the GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace jgg {

// A GPU as this rule sees it.
struct GpuSm80 {
  int processors;
  int shared_memory;  // bytes that a block may have: all of a multiprocessor's but 1 KB
};

// mm: rows of the result, which are in so many segments, times n columns. wgrad: as many results
// as there are matrices, with sums of k rows on average.
struct ProblemSm80 {
  bool mm;
  int64_t rows, n, k, matrices, segments;
};

enum class TileSm80 { kMedium, kSquare, kWide };

// Wide reads least. Two blocks of Square are on a processor, so one multiplies while the other
// stores. Medium is low, and has no pipeline.
struct TileTimesSm80 {
  TileSm80 tile;
  int m, n;
  int blocks, shared_memory;  // on a processor, and bytes that each needs, with the system's 1 KB
  int64_t most_segments;      // with more, a scan of them takes too long
  double time;                // of a product, relative to Wide's
  double rest;                // time of the rest of a tile, in values of k that take as long
};
// From measurements on an H200: docs/lab/sm80.md.
inline constexpr TileTimesSm80 kTilesSm80[] = {
    {TileSm80::kWide, 128, 256, 1, 102'000, 1024, 1.0, 180},
    {TileSm80::kSquare, 128, 128, 2, 75'000, 4096, 1.07, 130},
    {TileSm80::kMedium, 64, 128, 2, 75'000, INT64_MAX, 1.45, 130},
};

// How many tiles of m rows a problem has for each column of tiles. A segment but the last leaves
// half a tile empty on average.
inline int64_t RowsOfTiles(const ProblemSm80& p, int m) {
  const int64_t rows = (p.rows + m - 1) / m;
  return p.mm ? rows + std::max<int64_t>(p.segments - 1, 0) / 2 : rows * p.matrices;
}

// The time that a problem would take, in some unit.
inline double TimeSm80(const TileTimesSm80& tile, const ProblemSm80& p, const GpuSm80& gpu) {
  const int64_t tiles = RowsOfTiles(p, tile.m) * ((p.n + tile.n - 1) / tile.n);
  const int fit = std::clamp((gpu.shared_memory + 1024) / tile.shared_memory, 1, tile.blocks);
  const int64_t at_once = int64_t{std::max(gpu.processors, 1)} * fit;
  const auto rounds = static_cast<double>((tiles + at_once - 1) / at_once);
  // A block that could have another beside it is not faster alone.
  const double area = tile.m * tile.n * tile.blocks;
  return rounds * area * tile.time * (static_cast<double>(p.k) + tile.rest);
}

inline TileSm80 ChooseTileSm80(const ProblemSm80& p, const GpuSm80& gpu) {
  TileSm80 best = TileSm80::kMedium;
  double least = TimeSm80(*std::rbegin(kTilesSm80), p, gpu);
  for (const TileTimesSm80& tile : kTilesSm80) {
    const double time = TimeSm80(tile, p, gpu);
    if (p.segments <= tile.most_segments && time < least) {
      least = time;
      best = tile.tile;
    }
  }
  return best;
}

}  // namespace jgg

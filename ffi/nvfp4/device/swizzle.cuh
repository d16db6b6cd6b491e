// Linear scales (rows, k / 16) to tiles of 128 rows x 4 scales, each group beginning its own.
#pragma once

#include "nvfp4/device/groups.cuh"

namespace jgg::nvfp4::device {

// One tile: its rows and scales, and its number among the tiles of the result.
struct ScaleTile {
  int64_t row, scale, to;
  int rows;  // 0: no group has this tile
};

JGG_HOST_DEVICE ScaleTile FindScaleTile(const Product& p, bool b, const int32_t* starts,
                                        const int32_t* tiles, int64_t row_tile, int64_t k_tile) {
  const auto at_most_a_tile = [](int64_t rows) {
    return static_cast<int>(rows < kTileRows ? rows : kTileRows);
  };
  ScaleTile tile{};
  if (p.ragged_k) {
    if (k_tile >= tiles[p.groups]) return tile;
    const int g = GroupOfTile(tiles, p.groups, static_cast<int>(k_tile));
    tile.row = row_tile * kTileRows;
    tile.rows = at_most_a_tile((b ? p.n : p.m) - tile.row);
    tile.to = p.row_tiles(b) * tiles[g] + row_tile * (tiles[g + 1] - tiles[g]) + k_tile - tiles[g];
  } else if (b) {
    const int64_t row_tiles = CeilDiv(p.n, kTileRows), row = row_tile % row_tiles * kTileRows;
    tile.row = row_tile / row_tiles * p.n + row;
    tile.rows = at_most_a_tile(p.n - row);
    tile.to = row_tile * p.k_tiles() + k_tile;
  } else {
    if (row_tile >= tiles[p.groups]) return tile;
    const int g = GroupOfTile(tiles, p.groups, static_cast<int>(row_tile));
    tile.row = starts[g] + (row_tile - tiles[g]) * kTileRows;
    tile.rows = at_most_a_tile(starts[g + 1] - tile.row);
    tile.to = row_tile * p.k_tiles() + k_tile;
  }
  tile.scale = k_tile * kTileScales;
  return tile;
}

// Four scales of a row as one word, zeros past its end. E4M3 scales have no sign.
JGG_HOST_DEVICE uint32_t LoadFourScales(const uint8_t* scales, int64_t per_row, int64_t row,
                                        int64_t first) {
  const uint8_t* from = scales + row * per_row + first;
  uint32_t word = 0;
  if (per_row % 4 == 0) {
    word = *reinterpret_cast<const uint32_t*>(from);
  } else {
    for (int i = 0; i < 4 && first + i < per_row; ++i) word |= uint32_t{from[i]} << (8 * i);
  }
  return word & 0x7f7f7f7f;
}

// The sixteen bytes of a tile that hold its rows lane, lane + 32, lane + 64 and lane + 96.
JGG_HOST_DEVICE void SwizzleLane(const uint8_t* scales, int64_t per_row, const ScaleTile& tile,
                                 int lane, uint32_t (&words)[4]) {
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = lane + 32 * i;
    words[i] = row < tile.rows ? LoadFourScales(scales, per_row, tile.row + row, tile.scale) : 0;
  }
}

}  // namespace jgg::nvfp4::device

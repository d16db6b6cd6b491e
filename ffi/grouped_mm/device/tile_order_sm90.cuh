// Which tiles of a matrix a cluster of thread blocks takes, and in which order. Tested on the host,
// tests/lib/tile_order.cc.
#pragma once

namespace jgg::device {

// Divides non-negative integers. A division takes 100 cycles or more, and mostly none is needed,
// because the quotient is 0 or the divisor 1. A kernel of few tiles waits for its first one.
__device__ inline int Divide(int number, int by) {
  if (number < by) return 0;
  return by == 1 ? number : static_cast<int>(static_cast<unsigned>(number) / by);
}

// A block's tile. Without columns where it does not exist: the other block of the cluster has one.
struct TilePlace {
  int row, column;  // in tiles
  bool exists;
};

// The blocks of a cluster have tiles side by side, which share L. If the number of columns of tiles
// is odd, they have tiles of the last one above the other.
template <int kCluster>
struct TileOrder {
  int columns;  // of tiles

  // Both blocks have the same row of these.
  __device__ int SharedColumns() const { return columns / kCluster * kCluster; }

  // How many times a cluster has tiles, of so many rows of them.
  __device__ int Count(int rows) const {
    return rows * (columns / kCluster) + (columns % kCluster != 0 ? (rows + 1) / 2 : 0);
  }

  // Tiles come in bands of 2^log_band rows: down a band, then on to the next columns. So tiles that
  // run at one time share both operands in L2. One or two rows that are left make no band of their
  // own, since it would read all columns again.
  __device__ TilePlace At(int number, int rows, int block, int log_band) const {
    const int across = columns / kCluster, shared = rows * across;
    if (kCluster > 1 && number >= shared) {
      const int row = (number - shared) * kCluster + block;
      const bool exists = row < rows;
      return {exists ? row : rows - 1, columns - 1, exists};
    }
    const int most = 1 << log_band;
    int first = 0, band_rows = rows;
    if (rows > most + 2) {
      const int last = (rows - 3) >> log_band, at = Divide(number, across << log_band);
      first = (at < last ? at : last) << log_band;
      band_rows = at < last ? most : rows - first;
    }
    const int within = number - first * across;
    const int column = band_rows == most ? within >> log_band : Divide(within, band_rows);
    return {first + within - column * band_rows, column * kCluster + block, true};
  }
};

// Tiles of a cluster of two that are one above the other, and share R: in the order of TileOrder,
// of pairs of rows of tiles.
struct StackedOrder {
  int columns;  // of tiles

  __device__ int SharedColumns() const { return 0; }

  __device__ int Count(int rows) const { return (rows + 1) / 2 * columns; }

  __device__ TilePlace At(int number, int rows, int block, int log_band) const {
    const TilePlace pair = TileOrder<1>{columns}.At(number, (rows + 1) / 2, 0, log_band);
    const int row = 2 * pair.row + block;
    const bool exists = row < rows;
    return {exists ? row : rows - 1, pair.column, exists};
  }
};

// Shares out the rows of a matrix to tiles of at most kRows, in units. Only the last unit may be
// incomplete. Where the units do not fill all tiles, the last tiles have one less each. So no tile
// has very few rows.
template <int kRows>
struct RowShares {
  static constexpr int kUnit = kRows < 64 ? kRows : 64, kUnits = kRows / kUnit;
  int rows;

  __device__ int Tiles() const { return (rows + kRows - 1) / kRows; }

  // The first row of a tile; that of tile Tiles() is at or behind the end.
  __device__ int FirstRow(int tile) const {
    const int missing = kUnits * Tiles() - (rows + kUnit - 1) / kUnit;  // fewer than kUnits
    const int before = tile - Tiles() + missing;  // from tiles before this one
    return tile == 0 ? 0 : kUnit * (kUnits * tile - (before > 0 ? before : 0));
  }
};

}  // namespace jgg::device

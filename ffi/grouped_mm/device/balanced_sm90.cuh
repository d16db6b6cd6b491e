// wgrad of matrices that have many tiles, and of segments that may differ much in length. Matrices
// come in turn, and all clusters get as many tiles of one. The tiles that are left go to the
// clusters that have had least to do until then. Every cluster computes that for itself.
#pragma once

#include "grouped_mm/device/schedule_sm90.cuh"

namespace jgg::device {

template <int kRows, int kBlocks, int kCluster>
class BalancedSm90 : TilesSm90<kRows, kBlocks, kCluster, true> {
  using Tiles = TilesSm90<kRows, kBlocks, kCluster, true>;
  using Tiles::gemm_, Tiles::MatrixTiles, Tiles::SetMatrixTile;

 public:
  // `orders`: of ClusterTurns.
  __device__ BalancedSm90(const GemmSm90& gemm, int block, int* orders)
      : Tiles(gemm, block),
        turns_(orders, blockIdx.x / kCluster, gridDim.x / kCluster),
        more_(MatrixTiles() % static_cast<int>(gridDim.x / kCluster)) {
    Read(0);
  }

  // The whole warp; every lane gets the same tile. Without rows when there are no more.
  __device__ Work Next() {
    Work work{};
    const int tiles = MatrixTiles(), clusters = gridDim.x / kCluster;
    while (next_ >= tiles) {
      if (++matrix_ == gemm_.groups) return work;
      Advance();
      // A slice takes about 1024 cycles, all else of a tile 1280. (2500 balances 0-1% worse.)
      next_ = turns_.Next(more_, 4 * ((length_ + kSliceSm90 - 1) / kSliceSm90) + 5);
    }
    SetMatrixTile(work, next_, matrix_, x_start_, y_start_, length_);
    next_ += clusters;
    return work;
  }

 private:
  // Reads ahead: one after the other, matrices would wait for memory.
  __device__ void Read(int matrix) {
    if (matrix == gemm_.groups) return;
    if (gemm_.order.matrices) {
      ahead_ = ReadSegment(gemm_.metadata, gemm_.rows_x, gemm_.rows_y, gemm_.groups, matrix);
    } else {
      ahead_.length = gemm_.metadata.data[matrix];
    }
  }

  __device__ void Advance() {
    if (gemm_.order.matrices) {
      x_start_ = ahead_.x_start;
      y_start_ = ahead_.y_start;
      length_ = ahead_.length;
    } else {
      const uint32_t rows = gemm_.rows_x, size = max(ahead_.length, 0);
      const uint32_t start = x_start_ + length_;  // behind the segment before
      x_start_ = y_start_ = start;
      length_ = min(start + min(size, rows), rows) - start;
    }
    Read(matrix_ + 1);
  }

  ClusterTurns<kMostBalancedClusters> turns_;
  const int more_;
  Segment ahead_{};
  int matrix_ = -1, next_ = INT32_MAX / 2;  // no tile of any matrix yet
  int x_start_ = 0, y_start_ = 0, length_ = 0;
};

}  // namespace jgg::device

// In which order clusters of thread blocks take the tiles of a matrix: those that have had least to
// do first. Tested on the host, tests/turns.cc.
#pragma once

#include <cstdint>

namespace jgg::device {

// By one warp of every cluster, each for itself. Clusters stay in the order of what they have had
// to do until now; of a matrix, the first ones get one tile more than the others, and that merges
// them with the others anew. A tile's time is a few thousand cycles, and this must take less.
template <int kMostClusters>
class ClusterTurns {
 public:
  static constexpr int kMost = (kMostClusters + 31) / 32 * 32;

  // `orders`: 2 * kMost values in shared memory, of this warp alone.
  __device__ ClusterTurns(int* orders, int cluster, int clusters)
      : from_(orders),
        to_(orders + kMost),
        clusters_(clusters),
        cluster_(cluster),
        place_(cluster) {
    for (int i = threadIdx.x % 32; i < clusters; i += 32) from_[i] = i;
    __syncwarp();
  }

  // This cluster's place among all for the next matrix, of which the first `more` clusters get one
  // tile more, a tile of so much work.
  __device__ int Next(int more, int work) {
    const int cost = min(work, kMostWork) * kId, base = from_[0] / kId * kId, place = place_;
    const int lane = threadIdx.x % 32;
    // How many clusters of the other part come before each: both parts are in order.
    int keys[kPerLane], before[kPerLane] = {};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = 32 * j + lane;
      if (i < clusters_) keys[j] = from_[i] + (i < more ? cost : 0);
    }
#pragma unroll
    for (int step = kFirstStep; step > 0; step /= 2) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const bool takes = 32 * j + lane < more;
        const int next = before[j] + step, end = takes ? clusters_ - more : more;
        if (next <= end && from_[(takes ? more : 0) + next - 1] < keys[j] - (takes ? 0 : cost)) {
          before[j] = next;
        }
      }
    }
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = 32 * j + lane, at = i - (i < more ? 0 : more) + before[j];
      if (i >= clusters_) break;
      to_[at] = keys[j] - base;
      if (keys[j] % kId == cluster_) found = at;
    }
    place_ = __reduce_max_sync(0xffffffffu, found);
    __syncwarp();
    int* const to = to_;
    to_ = from_;
    from_ = to;
    return place;
  }

 private:
  static constexpr int kPerLane = kMost / 32, kFirstStep = kMost > 128 ? 128 : 64;
  // A value of an order: work, by which the first cluster of the order is ahead of none, times kId,
  // plus the cluster. So no two are the same.
  static constexpr int kId = 256, kMostWork = 1 << 21;

  int *from_, *to_;
  const int clusters_, cluster_;
  int place_;
};

}  // namespace jgg::device

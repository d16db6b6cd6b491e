// In which order clusters of thread blocks take tiles. Tested on the host, tests/lib/turns.cc.
#pragma once

#include <cstdint>

namespace jgg::device {

// Who takes which tiles of matrices in order, the longest first. Lengths may differ much. Clusters
// take turns there and back again, so that each gets about as much to do. It is different if very
// few matrices are much longer than all others. Their tiles have half as many rows then, if those
// can be halved. Clusters that begin with one of these tiles sit out the next rounds.
struct RankedTurns {
  int matrices;  // those that are much longer
  int held;      // their tiles; at most half of the clusters have one
  bool halved;
  int skipped;  // rounds

  // The tile of a cluster in a round, and in `round` the next one in which it takes part.
  __device__ int Next(int& round, int cluster, int clusters) const {
    int first = 0, before = round * clusters;
    if (skipped > 0) {
      if (round == 1 && cluster < held) round += skipped;
      first = round > 0 && round <= skipped ? held : 0;
      before = round * clusters - held * min(max(round - 1, 0), skipped);
    }
    const int tile = before + (round % 2 == 0 ? cluster - first : clusters - 1 - cluster);
    ++round;
    return tile;
  }
};

// By a warp. slices(i): of k, of the matrices in any order. A matrix has so many tiles of kRows
// rows, and so many halves.
template <int kRows, typename Slices>
__device__ RankedTurns TakeTurns(Slices slices, int count, int tiles, int halves, int products,
                                 int clusters) {
  constexpr unsigned kAll = 0xffffffffu;
  // In units of 128 cycles: a slice is multiplied in kRows / 32, a tile stored in 10. Half a slice
  // takes more than half the time, for its copies.
  const int whole = kRows / 32 * products, half = kRows / 64 * products + 1;
  auto work = [&](int i) { return static_cast<unsigned>(min(slices(i), 1 << 18) * whole + 10); };
  unsigned most = 0, sum = 0, of_long = 0, much_longer = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) most = max(most, work(i));
  most = __reduce_max_sync(kAll, most);
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const unsigned one = work(i);
    sum += one;
    if (2 * one >= most) of_long += one, ++much_longer;
  }
  sum = __reduce_add_sync(kAll, sum);
  of_long = __reduce_add_sync(kAll, of_long);
  const int matrices = __reduce_add_sync(kAll, much_longer), others = count - matrices;
  const bool halved = 2 * matrices * halves <= clusters;
  const int held = matrices * (halved ? halves : tiles);
  if (2 * held > clusters || others == 0) return RankedTurns{};
  const int other = (sum - of_long) / others, mean = of_long / matrices;
  return {matrices, held, halved, max((halved ? mean / whole * half : mean) / other - 1, 0)};
}

// Clusters that have had least to do take the tiles of a matrix first.
//
// One warp of every cluster computes this, each for itself. It keeps the clusters in the order of
// what they have had to do until now. The first ones get one tile of a matrix more than the others,
// and are then merged with the others anew. A tile takes a few thousand cycles, and this must take
// less.
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
  // A value of an order is work times kId, plus the cluster, so no two are the same. Work counts
  // from that of the first cluster of the order.
  static constexpr int kId = 256, kMostWork = 1 << 21;

  int *from_, *to_;
  const int clusters_, cluster_;
  int place_;
};

}  // namespace jgg::device

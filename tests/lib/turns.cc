// ffi/grouped_mm/device/turns_sm90.cuh on the host, for test_turns.py.
#include "cuda_on_host.h"
#include "grouped_mm/device/turns_sm90.cuh"

namespace {

template <int kMost>
void Turns(int clusters, int matrices, const int32_t* more, const int32_t* work, int32_t* places) {
  using Turns = jgg::device::ClusterTurns<kMost>;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    int orders[2 * Turns::kMost];
    Run(1, 32, [&] {
      Turns turns(orders, cluster, clusters);
      for (int i = 0; i < matrices; ++i) {
        const int place = turns.Next(more[i], work[i]);
        if (threadIdx.x == 0) places[i * clusters + cluster] = place;
      }
    });
  }
}

template <int kRows>
void RankedTiles(int clusters, int count, const int32_t* slices, int tiles, int halves, int rounds,
                 int32_t* turns, int32_t* found) {
  jgg::device::RankedTurns taken;
  Run(1, 32, [&] {
    const auto one = [&](int rank) { return slices[rank]; };
    const auto made = jgg::device::TakeTurns<kRows>(one, count, tiles, halves, 1, clusters);
    if (threadIdx.x == 0) taken = made;
  });
  const int32_t members[] = {taken.matrices, taken.held, taken.halved, taken.skipped};
  for (int i = 0; i < 4; ++i) turns[i] = members[i];
  for (int cluster = 0; cluster < clusters; ++cluster) {
    for (int round = 0; round < rounds;) {
      const int tile = taken.Next(round, cluster, clusters);
      if (round <= rounds) found[(round - 1) * clusters + cluster] = tile;
    }
  }
}

}  // namespace

// turns: the members of RankedTurns. found (rounds, clusters): the tiles, where a cluster takes
// one.
extern "C" void ranked_tiles(int rows, int clusters, int count, const int32_t* slices, int tiles,
                             int halves, int rounds, int32_t* turns, int32_t* found) {
  (rows == 256 ? RankedTiles<256> : RankedTiles<128>)(clusters, count, slices, tiles, halves,
                                                      rounds, turns, found);
}

// places (matrices, clusters): of each cluster, for each matrix.
extern "C" void turns(int most, int clusters, int matrices, const int32_t* more,
                      const int32_t* work, int32_t* places) {
  (most == 72 ? Turns<72> : Turns<144>)(clusters, matrices, more, work, places);
}

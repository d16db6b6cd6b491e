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

}  // namespace

// places (matrices, clusters): of each cluster, for each matrix.
extern "C" void turns(int most, int clusters, int matrices, const int32_t* more,
                      const int32_t* work, int32_t* places) {
  (most == 72 ? Turns<72> : Turns<144>)(clusters, matrices, more, work, places);
}

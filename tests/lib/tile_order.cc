// ffi/grouped_mm/device/tile_order_sm90.cuh on the host, for test_tile_order.py.
#include <cstdint>

#define __device__
#include "grouped_mm/device/tile_order_sm90.cuh"

using namespace jgg::device;

namespace {

// places (Count(rows), kCluster, 4): the members of TilePlace. Returns Count(rows).
template <int kCluster>
int Order(int rows, int columns, bool wgrad, int32_t* places) {
  const TileOrder<kCluster> order{columns};
  const int count = order.Count(rows);
  for (int i = 0; places != nullptr && i < count * kCluster; ++i) {
    const TilePlace place = order.At(i / kCluster, rows, i % kCluster, wgrad ? 3 : 2);
    const int32_t members[] = {place.row, place.column, place.column < order.SharedColumns(),
                               place.exists};
    for (int j = 0; j < 4; ++j) places[4 * i + j] = members[j];
  }
  return count;
}

// first (Tiles() + 1,): where each tile begins. Returns Tiles().
template <int kRows>
int Shares(int rows, int32_t* first) {
  const RowShares<kRows> shares{rows};
  for (int i = 0; first != nullptr && i <= shares.Tiles(); ++i) first[i] = shares.FirstRow(i);
  return shares.Tiles();
}

}  // namespace

extern "C" int order(int cluster, int rows, int columns, int wgrad, int32_t* places) {
  return cluster == 1 ? Order<1>(rows, columns, wgrad, places)
                      : Order<2>(rows, columns, wgrad, places);
}

extern "C" int shares(int most, int rows, int32_t* first) {
  switch (most) {
    case 32: return Shares<32>(rows, first);
    case 64: return Shares<64>(rows, first);
    case 128: return Shares<128>(rows, first);
    default: return Shares<256>(rows, first);
  }
}

// Where a gated activation's columns stand in a tile of w in shared memory: some gates, as many
// values that they multiply, and so forth, so that a warp's 64 columns have both. Where w lies in
// rows of N, a turn is half of those, since neighbouring threads copy columns that lie beside each
// other; where it lies in rows of K, less, so that all of a thread's rows are of one half.
#pragma once

namespace jgg::device {

template <bool kKMajor>
struct TurnSm80 {
  static constexpr int kColumns = kKMajor ? 16 : 32;
  static constexpr int kPieces = kColumns / 8;  // of 8 columns

  // Whether column mn of the tile is a value, and which column of its half it is.
  static constexpr bool IsValue(int mn) { return (mn & kColumns) != 0; }
  static constexpr int Column(int mn) { return mn / (2 * kColumns) * kColumns + mn % kColumns; }

  // Which 8 of a warp's 64 columns have the gates of so many 8 results. Their values are kPieces
  // behind.
  static constexpr int GatePiece(int piece) {
    return piece / kPieces * 2 * kPieces + piece % kPieces;
  }
};

// A warp's results have the gates and the values of the same columns, 32 of them in order.
template <bool kKMajor>
constexpr bool TurnsMeet() {
  using Turn = TurnSm80<kKMajor>;
  for (int warp = 0; warp < 4; ++warp) {
    for (int c = 0; c < 32; ++c) {
      const int gate = 64 * warp + 8 * Turn::GatePiece(c / 8) + c % 8;
      const int value = gate + 8 * Turn::kPieces;
      if (value / 64 != warp || Turn::IsValue(gate) || !Turn::IsValue(value)) return false;
      if (Turn::Column(gate) != 32 * warp + c || Turn::Column(value) != 32 * warp + c) return false;
    }
  }
  return true;
}
static_assert(TurnsMeet<true>() && TurnsMeet<false>());

}  // namespace jgg::device

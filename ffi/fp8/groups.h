// Grouped rows of FP8: those along which blocks lie are padded to whole blocks, group by group.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jgg {

// How many there are room for, whatever the sizes are.
inline int64_t Fp8PaddedRows(int64_t rows, int64_t groups) {
  return (rows + 127 * std::min(groups, rows)) / 128 * 128;
}

// 32-bit words of what is found out about groups: each of them and the end of all takes two, and so
// does each tile of 128 padded rows.
inline int64_t Fp8GroupsWords(int64_t groups, int64_t tiles) {
  return 2 * (groups + 1) + 2 * tiles;
}

}  // namespace jgg

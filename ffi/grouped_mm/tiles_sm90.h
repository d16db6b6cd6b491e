// Which tiles the Hopper kernel of mm and wgrad has: host code without CUDA, for kernels, handlers
// and, through _ffi, Python.
#pragma once

#include <cstdint>

namespace jgg::rules {

// Tiles, by their rows, the lowest first.
constexpr int kTilesSm90[] = {32, 64, 128, 256, 288};

// Whether there is a kernel with tiles of so many rows. `l_k_major`: x is contiguous along k, as it
// always is in mm; wgrad contracts its rows.
constexpr bool HasTileSm90(bool wgrad, bool gated, bool l_k_major, int tile) {
  if (gated) return tile == 32 || tile == 128;
  if (tile == 32 || tile == 288) return l_k_major && !(wgrad && tile == 288);
  return tile == 64 || tile == 128 || tile == 256;
}

}  // namespace jgg::rules

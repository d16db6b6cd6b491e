// Codes of lines as a stage of the Hopper kernel has them. Plain C++ on the host, too.
#pragma once

#include <cstdint>

#include "quantized/device/packed_codes.cuh"
#include "quantized/device/streams.cuh"

namespace jgg::device {

// Codes of 128 k of 64 lines, as TMA brings them, and how threads read them.
template <int kBits>
struct LineTile {
  static constexpr bool kBySlices = kBits == 4 || kBits == 8;
  static constexpr int kLineBytes = 128 * kBits / 8, kBytes = 64 * kLineBytes;
  // Words of what is read at once of 32 codes.
  static constexpr int kWords = kBySlices ? kBits / 2 : kBits;

  // By slices: half `i` of piece `piece`, of 32 codes, of the line `further` behind one. Boxes are
  // swizzled, the same every 8 lines.
  JGG_HOST_DEVICE static const char* Half(const char* codes, int line, int further, int piece,
                                          int i) {
    const int at =
        kBits == 4 ? (piece ^ (line / 2 % 4)) * 16 + 8 * i : ((2 * piece + i) ^ (line % 8)) * 16;
    return codes + (line + further) * kLineBytes + at;
  }

  // Else all of it, as decoders take it.
  JGG_HOST_DEVICE static void Load(const char* codes, int line, int piece, uint32_t (&to)[kBits]) {
    const char* from = codes + line * kLineBytes + piece * 4 * kBits;
    constexpr int kTogether = kBits % 2 == 0 ? 2 : 1;
    uint32_t words[kBits];
    JGG_UNROLL
    for (int i = 0; i < kBits; i += kTogether) LoadWords<kTogether>(from + 4 * i, words + i);
    if constexpr (kBits == 2) {
      to[0] = words[0], to[1] = words[1];
    } else {
      ToStreams(words, to);
    }
  }
};

}  // namespace jgg::device

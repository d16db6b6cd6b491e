// Float32 numbers as bfloat16 planes, whose sum they are: _grouped/planes.py has the same. Plain
// C++ on the host, for tests/quantized/test_decode.py.
#pragma once

#include <cstdint>

#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr int kValuePlanes = 3;

// The planes of a pair of numbers, a word each, the largest first. Each has the next 8 bits, cut
// off.
// Planes of an infinite number, but for its first, are NaN.
JGG_HOST_DEVICE void PlanesOfPair(float low, float high, uint32_t (&planes)[kValuePlanes]) {
  const auto rest = [](float value) {
    return Add(value, -AsFloat(AsBits(value) & 0xffff0000));  // exact
  };
  JGG_UNROLL
  for (int i = 0; i < kValuePlanes; ++i) {
    if (i > 0) low = rest(low), high = rest(high);
    planes[i] = Permute(AsBits(low), AsBits(high), 0x7632);
  }
}

}  // namespace jgg::device

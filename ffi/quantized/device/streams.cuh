// 32 codes of a line as they are stored, as 16 pairs of bfloat16: numbers p and 16 + p are a pair.
// Plain C++ on the host, where tests/test_decode.py tries every code.
#pragma once

#include <cstdint>

#include "quantized/device/instructions.cuh"

namespace jgg::device {

// 32 codes as two streams of 16, one in words' lower halves, one in the upper.
template <int kBits>
JGG_HOST_DEVICE void ToStreams(const uint32_t (&words)[kBits], uint32_t (&streams)[kBits]) {
  JGG_UNROLL
  for (int i = 0; i < kBits; ++i) {
    const int upper = i + kBits;  // as halves of words
    const uint32_t selector = (i % 2 ? 0x32 : 0x10) | (upper % 2 ? 0x7600 : 0x5400);
    streams[i] = Permute(words[i / 2], words[upper / 2], selector);
  }
}

// Codes p and 16 + p as whole numbers in bfloat16.
template <int kBits>
JGG_HOST_DEVICE uint32_t NumbersOf(const uint32_t* streams, int p) {
  constexpr uint32_t k128 = 0x43004300, kTwice = 0x10001, kMask = (1u << kBits) - 1;
  const int word = kBits * p / 16, at = kBits * p % 16;
  if constexpr (kBits == 8) {
    // 128 and the lower seven bits; less 128 (two times 64) where the highest is not set.
    const uint32_t stream = streams[word];
    const uint32_t highest = ~(at == 0 ? stream << 7 : stream >> 1) & 0x40004000;
    return MultiplyAdd2<DType::kBF16>(highest, 0xc280c280,
                                      MaskOr(stream >> at, 0x7f * kTwice, k128));
  } else {
    // Bit `place` of a half is worth one: several codes share a shift.
    int place = at % 6;
    if (place + kBits > 7) place = 0;
    uint32_t wide;
    if (at + kBits > 16) {
      const uint32_t low = (1u << (16 - at)) - 1;
      place = 0;
      wide = MaskOr(streams[word] >> at, low * kTwice, k128);
      wide = MaskOr(streams[word + 1] << (16 - at), (kMask & ~low) * kTwice, wide);
    } else {
      wide = MaskOr(streams[word] >> (at - place), (kMask << place) * kTwice, k128);
    }
    const uint32_t unit = static_cast<uint32_t>(127 - place) << 7;
    const uint32_t offset = 0x8000 | static_cast<uint32_t>(134 - place) << 7;
    return MultiplyAdd2<DType::kBF16>(wide, unit * kTwice, offset * kTwice);
  }
}

// e2m1 codes p and 16 + p, 2^-126 times their values, in bfloat16.
JGG_HOST_DEVICE uint32_t E2M1Of(const uint32_t* streams, int p) {
  constexpr uint32_t kSign = 0x80008000, kRest = 0x01c001c0;
  const uint32_t stream = streams[p / 4];
  switch (p % 4) {
    case 0: return MaskOr(stream << 12, kSign, stream << 6 & kRest);
    case 1: return MaskOr(stream << 8, kSign, stream << 2 & kRest);
    case 2: return MaskOr(stream << 4, kSign, stream >> 2 & kRest);
    default: return MaskOr(stream, kSign, stream >> 6 & kRest);
  }
}

// e4m3 codes p and 16 + p, 2^-120 times their values.
JGG_HOST_DEVICE uint32_t E4M3Of(const uint32_t* streams, int p) {
  constexpr uint32_t kSign = 0x80008000, kRest = 0x07f007f0;
  const uint32_t stream = streams[p / 2];
  return p % 2 == 0 ? MaskOr(stream << 8, kSign, stream << 4 & kRest)
                    : MaskOr(stream, kSign, stream >> 4 & kRest);
}

}  // namespace jgg::device

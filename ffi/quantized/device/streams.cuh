// 32 codes of a line as they are stored, as 16 pairs of bfloat16: numbers p and 16 + p are a pair.
// Plain C++ on the host, where tests/quantized/test_decode.py tries every code.
#pragma once

#include <cstdint>

#include "quantized/device/code_pairs.cuh"

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

// Codes p and 16 + p, which end before bit kEnd.
template <int kBits, int kEnd>
JGG_HOST_DEVICE CodePair CodesOf(const uint32_t* streams, int p, uint32_t more) {
  constexpr uint32_t kTwice = 0x10001, kMask = (1u << kBits) - 1;
  const int word = kBits * p / 16, at = kBits * p % 16;
  if (at + kBits > 16) {
    const uint32_t low = (1u << (16 - at)) - 1;
    more = MaskOr(streams[word] >> at, low * kTwice, more);
    return {MaskOr(streams[word + 1] << (16 - at), (kMask & ~low) * kTwice, more), 0};
  }
  // Several codes share a shift. Alone they are in few places, each of which needs scales.
  constexpr int kShared = kEnd == kEndBeside1024 && kBits <= 4 ? 8 : 6;
  int place = kEnd == kEndAlone ? at / kBits * kBits % (kEnd / kBits * kBits) : at % kShared;
  if (place + kBits > kEnd) place = 0;
  return {MaskOr(streams[word] >> (at - place), (kMask << place) * kTwice, more), place};
}

// The same as whole numbers in bfloat16.
template <int kBits>
JGG_HOST_DEVICE uint32_t NumbersOf(const uint32_t* streams, int p) {
  if constexpr (kBits == 8) {
    // 128 and the lower seven bits; less 128 (two times 64) where the highest is not set.
    const uint32_t stream = streams[p / 2];
    const int at = p % 2 * 8;
    const uint32_t highest = ~(at == 0 ? stream << 7 : stream >> 1) & 0x40004000;
    return MultiplyAdd2<DType::kBF16>(highest, 0xc280c280,
                                      MaskOr(stream >> at, 0x007f007f, k128Twice));
  } else {
    return NumbersBeside128(CodesOf<kBits, kEndBeside128>(streams, p, k128Twice));
  }
}

// ... in float16.
template <int kBits>
JGG_HOST_DEVICE uint32_t HalfNumbersOf(const uint32_t* streams, int p) {
  return NumbersBeside1024(CodesOf<kBits, kEndBeside1024>(streams, p, k1024Twice));
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

// ... 2^-14 times their values, in float16.
JGG_HOST_DEVICE uint32_t E2M1HalvesOf(const uint32_t* streams, int p) {
  constexpr uint32_t kSign = 0x80008000, kRest = 0x0e000e00;
  const uint32_t stream = streams[p / 4];
  switch (p % 4) {
    case 0: return MaskOr(stream << 12, kSign, stream << 9 & kRest);
    case 1: return MaskOr(stream << 8, kSign, stream << 5 & kRest);
    case 2: return MaskOr(stream << 4, kSign, stream << 1 & kRest);
    default: return MaskOr(stream, kSign, stream >> 3 & kRest);
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

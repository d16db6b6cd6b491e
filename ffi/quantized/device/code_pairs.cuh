// Two affine codes in the halves of a word, and how they become a pair of bfloat16. Plain C++ on
// the host, for tests/quantized/test_decode.py.
#pragma once

#include <cstdint>

#include "quantized/device/instructions.cuh"

namespace jgg::device {

// Codes from bit `place` of each half on, or-ed with what was asked for. After one shift several
// codes of a word can be taken, as long as they end before some bit.
struct CodePair {
  uint32_t bits;
  int place;
};

// With k128Twice: 128 + code * 2^place, since 128's last place is 1; so codes end before bit 7.
constexpr uint32_t k128Twice = 0x43004300;
constexpr int kEndBeside128 = 7;

// As whole numbers, by one product.
JGG_HOST_DEVICE uint32_t NumbersBeside128(CodePair pair) {
  const uint32_t unit = static_cast<uint32_t>(127 - pair.place) << 7;
  const uint32_t offset = 0x8000 | static_cast<uint32_t>(134 - pair.place) << 7;
  return MultiplyAdd2<DType::kBF16>(pair.bits, unit * 0x10001, offset * 0x10001);
}

// The same in float16, with k1024Twice: codes end before bit 10.
constexpr uint32_t k1024Twice = 0x64006400;
constexpr int kEndBeside1024 = 10;

JGG_HOST_DEVICE uint32_t NumbersBeside1024(CodePair pair) {
  const uint32_t unit = static_cast<uint32_t>(15 - pair.place) << 10;
  const uint32_t offset = 0x8000 | static_cast<uint32_t>(25 - pair.place) << 10;
  return MultiplyAdd2<DType::kF16>(pair.bits, unit * 0x10001, offset * 0x10001);
}

// Alone a half is code * 2^place times bfloat16's smallest, 2^-133, also where bit 7 is set, which
// is the last one of the exponent.
constexpr int kEndAlone = 8;

// Has the highest bit of both halves clear where those do for `both`, scale and bias. Sums are in
// units of 2^8, so scales are times 2^125 and biases times 2^-8. All are normal, and so is what
// becomes of them: from 2^-100 on, to 2^3 and 2^100. 0, which is rare, is left out.
constexpr uint32_t kHighest = 0x80008000;
JGG_HOST_DEVICE uint32_t NotSmall(uint32_t both) {
  constexpr uint32_t kMost = 0x71804100, kLeast = 0x0d800d80;
  const uint32_t size = both & ~kHighest;
  return (size + (kHighest - kMost)) | ~(size + (kHighest - kLeast));
}

// The scales that codes meet which are alone at a place: those of `both`, in its places.
JGG_HOST_DEVICE uint32_t SmallScales(uint32_t both, int place) {
  return Multiply2(both, 0x3b800000 | static_cast<uint32_t>(252 - place) << 7);
}

// In float16 alone is code * 2^place times its smallest, 2^-24, up to bit 10, the last one of the
// exponent. Codes of 2 bits are at 9 or at 7 there. A scale times 2^17 is a float16 below 1/2.
// Neither has a least number: products take subnormal ones.
JGG_HOST_DEVICE uint32_t NotSmallHalf(uint32_t both) {  // not 0 where it is not small
  return (both & 0x7fff) < 0x3800 ? 0 : 1;
}

// From one place of a code to the next lower one of these: scales times 2^15 for 9, from `both`,
// and times 4 more for 7, from those for 9.
JGG_HOST_DEVICE uint32_t SmallHalfScales(uint32_t both, int place) {
  return MultiplyAdd2<DType::kF16>(both, place == 9 ? 0x3c007800 : 0x3c004400, 0x80008000);
}

}  // namespace jgg::device

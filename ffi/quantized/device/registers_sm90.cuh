// Decoding to pairs of bfloat16, in registers: what WGMMA takes as its A operand. For every 16 k a
// thread has four words: of its row k and k + 1, of the row 8 below the same, of its row k + 8 and
// k + 9, of the other the same; k = 2 * (lane % 4).
#pragma once

#include <cstdint>

#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr uint32_t k2To120 = 0x7b807b80, k2To126 = 0x7e807e80;  // pairs of 2^120 and 2^126

// Codes come to their places as tiny numbers, subnormal ones mostly. What they are too small by is
// one factor with their scales (and the sum's unit) where that is a bfloat16, kSmall, as usual;
// kAny takes one instruction more for every pair. kSums: codes come as numbers, and scales multiply
// their sums. kRounded: as kAny, and float16 values of mxfp4 are those of bfloat16, rounded.
enum class ScaleRange { kAny, kSmall, kSums, kRounded };

// Bytes of e8m0 without these bits are small: times 2^126 they still are a bfloat16.
constexpr uint32_t kHighestOfBytes = 0x80808080;

template <ScaleRange kRange>
__device__ uint32_t MultiplyMxfp4(uint32_t pair, uint32_t scale) {
  return Multiply2(kRange == ScaleRange::kSmall ? pair : Multiply2(pair, k2To126), scale);
}

// The lower or upper half of a word, twice: for products an operand's modifier, no instruction.
JGG_HOST_DEVICE uint32_t Twice(uint32_t word, int half) {
#ifdef __CUDA_ARCH__
  uint32_t out;
  if (half == 0) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {a, a}; }" : "=r"(out) : "r"(word));
  } else {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, b}; }" : "=r"(out) : "r"(word));
  }
  return out;
#else
  return Permute(word, 0, half == 0 ? 0x1010 : 0x3232);
#endif
}

// 2^exponent. kHidden: the compiler does not know, so that products by it are not done by the pipe
// of shifts and masks, which is the busiest where there are few rows.
template <bool kHidden>
__device__ uint32_t PowerOfTwo(int exponent) {
  return (kHidden ? gridDim.z : 1u) << exponent;
}

}  // namespace jgg::device

// The instruction of products of FP8 codes, by name. Tests have their own on the host.
#pragma once

#include <cstdint>

#ifdef __CUDACC__

namespace jgg::device {

// sums (16 x 8) = A (16 x 32) B (32 x 8), plus the sums unless these products are the first. B's
// codes are e4m3, A's e5m2 or e4m3. From 8.9 on, because PTX of 8.0 has no such instruction.
template <bool kE5M2, bool kFirst>
__device__ __forceinline__ void MultiplyCodes(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
#define JGG_MULTIPLY_CODES(type)                                                               \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." type                                   \
               ".e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
               : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),                 \
                 "f"(kFirst ? 0.0f : sums[0]), "f"(kFirst ? 0.0f : sums[1]),                   \
                 "f"(kFirst ? 0.0f : sums[2]), "f"(kFirst ? 0.0f : sums[3]))
  if constexpr (kE5M2) {
    JGG_MULTIPLY_CODES("e5m2");
  } else {
    JGG_MULTIPLY_CODES("e4m3");
  }
#undef JGG_MULTIPLY_CODES
#endif
}

}  // namespace jgg::device

#endif

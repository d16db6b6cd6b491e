// Instructions of products with packed weights, by name, beside those of the pipeline
// (grouped_mm/device/instructions_sm80.cuh). On the host tests/lib/async_on_host.h has them.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef __CUDACC__

#include "grouped_mm/device/instructions_sm80.cuh"

namespace jgg::device {

// The dynamic shared memory of a block.
__device__ inline unsigned char* SharedBytes() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

// A place in shared memory.
using Place = uint32_t;

__device__ inline Place PlaceOf(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// kCount words: 1, 2 or 4.
template <int kCount>
__device__ void LoadPlace(Place from, uint32_t* to) {
  if constexpr (kCount == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
  }
}

// 16 bytes that no other block reads soon.
__device__ inline uint4 LoadOnce(const char* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// Copies 16 bytes, if bit kBit of `wanted` is set. Asked in assembly, so that no answers are kept
// in registers.
template <int kBit = 0>
__device__ void CopyIf(uint32_t wanted, Place to, const char* from) {
  asm volatile(
      "{\n"
      ".reg .pred yes;\n"
      ".reg .b32 bit;\n"
      "and.b32 bit, %2, %3;\n"
      "setp.ne.b32 yes, bit, 0;\n"
      "@yes cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}" ::"r"(to),
      "l"(from), "r"(wanted), "n"(1 << kBit)
      : "memory");
}

// Four 8 x 8 matrices of 16-bit values: lane l names a row of matrix l / 8.
__device__ inline void LoadMatricesAt(Place row, uint32_t (&to)[4]) {
  LoadMatrices<false>(row, to);
}

// m16n8k16 of float16 or bfloat16.
#define JGG_MULTIPLY(type)                                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <DType kX>
__device__ void MultiplyAtoms(const uint32_t* a, uint32_t b0, uint32_t b1, float* sums) {
  if constexpr (kX == DType::kBF16) {
    JGG_MULTIPLY("bf16");
  } else {
    JGG_MULTIPLY("f16");
  }
}
#undef JGG_MULTIPLY

// place ^ bits, in assembly, so that none of several such places is kept in a register.
__device__ inline Place Flipped(Place place, int bits) {
  asm volatile("xor.b32 %0, %0, %1;" : "+r"(place) : "r"(bits));
  return place;
}

}  // namespace jgg::device
#endif

// Instructions of whole warps, beside tensor copies and warpgroup products. On the host
// tests/lib/warp_on_host.h has them.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef __CUDACC__
#include "grouped_mm/device/primitives_sm90.cuh"

namespace jgg::device {

// The dynamic shared memory of a block.
__device__ inline char* DynamicMemory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// A number of which the compiler knows nothing: what follows from it is computed again.
__device__ inline uint32_t Forgotten(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Four 8 x 8 matrices of bfloat16: lane l names a row of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadMatrices(const char* row, uint32_t (&to)[4]) {
  LoadMatrices(SharedAddress(row), to);
}

// Four words of shared memory, or zeros.
__device__ inline void LoadOrZeros(bool load, const char* from, uint32_t* to) {
  asm volatile(
      "{\n"
      ".reg .pred load;\n"
      "setp.ne.s32 load, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@load ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3])
      : "r"(SharedAddress(from)), "r"(static_cast<int>(load))
      : "memory");
}

// An 8 x 8 matrix of a warp, turned.
__device__ inline uint32_t Turned(uint32_t matrix) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

// m16n8k16.
#define JGG_MULTIPLY_WARP(type)                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <DType kX = DType::kBF16>
__device__ inline void MultiplyWarp(const uint32_t* a, uint32_t b0, uint32_t b1, float* sums) {
  if constexpr (kX == DType::kBF16) {
    JGG_MULTIPLY_WARP("bf16");
  } else {
    JGG_MULTIPLY_WARP("f16");
  }
}
#undef JGG_MULTIPLY_WARP

}  // namespace jgg::device
#endif

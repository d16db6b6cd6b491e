// Instructions of the pipeline (pipelined_sm80.cuh), by name. Tests have their own on the host.
#pragma once

#include <cstdint>

#ifdef __CUDACC__

#include "cute/arch/copy_sm80.hpp"

namespace jgg::device {

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// If `wanted`, copies 16 bytes, or writes as many zeros.
__device__ inline void CopyAsync(uint32_t to, const void* from, bool wanted, bool zeros) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3;\n"
      "}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)), "r"(zeros ? 0 : 16)
      : "memory");
}

// Moves a pointer. In assembly, so that multiples of the distance are not kept in registers.
__device__ inline void Advance(const char*& pointer, int64_t bytes) {
  asm volatile("add.s64 %0, %0, %1;" : "+l"(pointer) : "l"(bytes));
}

// a ^ b, anew in every use.
__device__ inline uint32_t ExclusiveOr(uint32_t a, uint32_t b) {
  if (b != 0) asm volatile("xor.b32 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// What this thread copied since the last call is one of its groups of copies.
__device__ inline void EndCopies() { cute::cp_async_fence(); }

// All groups of this thread's copies but the last kPending have arrived.
template <int kPending>
__device__ void WaitForCopies() {
  cute::cp_async_wait<kPending>();
}

// Four 8 x 8 matrices of 16-bit elements, of which each lane names a line; transposed, or not.
template <bool kTransposed>
__device__ void LoadMatrices(uint32_t from, uint32_t (&values)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(from)
                 : "memory");
  }
}

// This thread's number, read anew: so nothing that follows from it is kept in a register for later.
__device__ inline int ThreadAnew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace jgg::device

#endif

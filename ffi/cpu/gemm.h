// C (+)= A B on one thread: strided operands of any handled dtype, float32 sums.
// The one building block of the CPU handlers; compiled once per instruction set.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jgg::cpu {

// A matrix in memory. `row` and `column` are elements from one index to the next.
struct Matrix {
  void* data;
  int64_t row, column;
  DType dtype;
};

// Scratch that one thread's calls share; kScratchFloats floats, 64-byte aligned.
constexpr int64_t kBlockM = 96, kBlockN = 512, kBlockK = 128;
constexpr int64_t kScratchFloats = kBlockM * kBlockK + kBlockK * kBlockN + kBlockM * kBlockN;

// C[m, n] = A[m, k] B[k, n], or += with `accumulate`. k == 0 gives zeros.
using Gemm = void (*)(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b,
                      const Matrix& c, bool accumulate, float* scratch);

void GemmBaseline(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b,
                  const Matrix& c, bool accumulate, float* scratch);
#ifdef JGG_X86_LEVELS
void GemmV3(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, const Matrix& c,
            bool accumulate, float* scratch);
void GemmV4(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, const Matrix& c,
            bool accumulate, float* scratch);
#endif

// The best of these on this processor.
Gemm BestGemm();

// To bfloat16 or float16: to nearest, ties to even; a NaN stays one.
void Round(const float* in, int64_t count, DType dtype, uint16_t* out);

}  // namespace jgg::cpu

// C = A_1 B_1 + A_2 B_2 + ... on one thread: strided operands of any handled dtype.
// The one building block of the CPU handlers; compiled once per instruction set.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jgg::cpu {

// Lines that become numbers when they are packed. `read` writes elements [first, first + count) of
// one as float32, and whatever it likes behind them up to a whole kUnit. `first` begins a unit.
constexpr int64_t kUnit = 16;
struct Source {
  void (*read)(const void* context, int64_t line, int64_t first, int64_t count, float* out);
  const void* context;
};

// A matrix in memory. `row` and `column` are elements from one index to the next.
//
// Rows or columns may come by list: line i is then line rows[i], or columns[i], of the `lines` in
// memory. If memory has no such line, it is zeros. Elements of such a line are neighbours. Results
// have no list.
//
// Or lines have a source. Then the axis whose stride is 1 runs along them, from `element` on, and
// the other one begins at line `line`.
struct Matrix {
  void* data;
  int64_t row, column;
  DType dtype;
  const int32_t *rows = nullptr, *columns = nullptr;
  int64_t lines = 0;
  const Source* source = nullptr;
  int64_t line = 0, element = 0;
};

// A (rows, k) times B (k, n), added to the rows of C from `row` on.
struct Product {
  int64_t row, rows, k;
  Matrix a, b;
};

// The products of one C. at(context, index) makes number `index`, below `count`.
struct Products {
  int64_t count;
  Product (*at)(const void* context, int64_t index);
  const void* context;
};

// Gemm computes one tile of C at a time, from kBlockK of its k.
constexpr int64_t kBlockM = 192, kBlockN = 512, kBlockK = 128;

// How a sum of any length stays right: Gemm sums kBlockK products from zero, as float32. It sums up
// to kBlocksOfSum such blocks as float32. It adds those sums, and those of products that have other
// rows of C, as float64. So 2^-16 * sum |a| |b| bounds the error, before C is rounded.
constexpr int64_t kBlocksOfSum = 128;

// One thread's memory for its calls, 64-byte aligned.
struct Scratch {
  float a[kBlockM * kBlockK], b[kBlockK * kBlockN], sum[kBlockM * kBlockN];
  double total[kBlockM * kBlockN];
};

// C (m, n) is the sum of the products, in their order. Rows of no product are zeros.
using Gemm = void (*)(int64_t m, int64_t n, const Products& products, const Matrix& c,
                      Scratch* scratch);

void GemmBaseline(int64_t m, int64_t n, const Products& products, const Matrix& c,
                  Scratch* scratch);
#ifdef JGG_X86_LEVELS
void GemmV3(int64_t m, int64_t n, const Products& products, const Matrix& c, Scratch* scratch);
void GemmV4(int64_t m, int64_t n, const Products& products, const Matrix& c, Scratch* scratch);
#endif

// The best of these on this processor.
Gemm BestGemm();

// From now on the best is sought up to x86-64-v<level>, or is the baseline with 0. For tests.
void AtMostLevel(int level);

// To bfloat16 or float16: to nearest, ties to even; a NaN stays one.
void Round(const float* in, int64_t count, DType dtype, uint16_t* out);

}  // namespace jgg::cpu

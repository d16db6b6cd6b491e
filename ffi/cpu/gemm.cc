// C (+)= A B: blocks of A and B are packed as float32 in the order in which the inner kernel reads
// them; the inner kernel keeps a kRows x 16 tile of C in registers.
//
// Compiled once per instruction set, with JGG_GEMM naming the function. Nothing here may be a
// template or inline function of another header: the linker keeps one copy of such, which could
// be the one with instructions that the processor lacks.

#include "cpu/gemm.h"

#include <string.h>

#ifndef JGG_GEMM
#define JGG_GEMM GemmBaseline
#endif

namespace jgg::cpu {
namespace {

// One vector register, and a tile of C that leaves room for a row of B and one value of A.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 3;
#endif
constexpr int kColumns = 16;
constexpr int kParts = kColumns / kLanes;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float Widen(float value) { return value; }

float Widen(Bf16 value) { return FromBits(static_cast<uint32_t>(value.bits) << 16); }

float Widen(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Subnormals by conversion, not as float32 subnormals: those may be flushed to zero.
  if (magnitude < 0x400u) return FromBits(sign | 0x3f800000u) * (magnitude * 0x1p-24f);
  const uint32_t exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;  // Inf and NaN
  return FromBits(sign | ((magnitude << 13) + exponent));
}

// Packs `second_count` x `first_count` elements in strips of kWidth of the second index:
// out[strip][first index][kWidth], zeros past the end. `first` and `second` are element strides.
template <int kWidth, typename T>
void PackRuns(const T* in, int64_t first_count, int64_t first, int64_t second_count, int64_t second,
              float* out) {
  const int64_t whole = second_count / kWidth * kWidth;
  if (second == 1) {
    // Along memory, across the strips: long runs of one row at a time.
    for (int64_t i = 0; i < first_count; ++i) {
      for (int64_t strip = 0; strip < whole; strip += kWidth) {
        const T* from = in + i * first + strip;
        float* to = out + strip * first_count + i * kWidth;
        for (int j = 0; j < kWidth; ++j) to[j] = Widen(from[j]);
      }
    }
  } else {
    for (int64_t strip = 0; strip < whole; strip += kWidth) {
      const T* from = in + strip * second;
      float* to = out + strip * first_count;
      for (int64_t i = 0; i < first_count; ++i) {
        for (int j = 0; j < kWidth; ++j) to[i * kWidth + j] = Widen(from[i * first + j * second]);
      }
    }
  }
  if (whole == second_count) return;
  const T* from = in + whole * second;
  float* to = out + whole * first_count;
  for (int64_t i = 0; i < first_count; ++i) {
    for (int64_t j = 0; j < kWidth; ++j) {
      const bool inside = j < second_count - whole;
      to[i * kWidth + j] = inside ? Widen(from[i * first + j * second]) : 0.0f;
    }
  }
}

template <int kWidth, typename T>
void PackAs(const Matrix& matrix, int64_t origin, int64_t first_count, int64_t first,
            int64_t second_count, int64_t second, float* out) {
  const T* in = static_cast<const T*>(matrix.data) + origin;
  PackRuns<kWidth>(in, first_count, first, second_count, second, out);
}

template <int kWidth>
void Pack(const Matrix& matrix, int64_t origin, int64_t first_count, int64_t first,
          int64_t second_count, int64_t second, float* out) {
  const auto pack = matrix.dtype == DType::kF32    ? PackAs<kWidth, float>
                    : matrix.dtype == DType::kBF16 ? PackAs<kWidth, Bf16>
                                                   : PackAs<kWidth, F16>;
  pack(matrix, origin, first_count, first, second_count, second, out);
}

// sum[kRows][kBlockN stride] (+)= a[k][kRows]^T b[k][16].
void Kernel(int64_t k, const float* a, const float* b, float* sum, bool accumulate) {
  Vector acc[kRows][kParts];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) {
      const Vector* from = reinterpret_cast<const Vector*>(sum + i * kBlockN) + j;
      acc[i][j] = accumulate ? *from : Vector{};
    }
  }
  for (int64_t p = 0; p < k; ++p) {
    const Vector* right = reinterpret_cast<const Vector*>(b + p * kColumns);
    const float* left = a + p * kRows;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) acc[i][j] += left[i] * right[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) {
      reinterpret_cast<Vector*>(sum + i * kBlockN)[j] = acc[i][j];
    }
  }
}

float Load(const Matrix& matrix, int64_t at) {
  switch (matrix.dtype) {
    case DType::kBF16: return Widen(static_cast<const Bf16*>(matrix.data)[at]);
    case DType::kF16: return Widen(static_cast<const F16*>(matrix.data)[at]);
    case DType::kF32: break;
  }
  return static_cast<const float*>(matrix.data)[at];
}

void Store(const Matrix& c, int64_t row, int64_t column, int64_t rows, int64_t columns, float* sum,
           bool accumulate) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t origin = (row + i) * c.row + column * c.column;
    float* from = sum + i * kBlockN;
    if (accumulate) {
      for (int64_t j = 0; j < columns; ++j) from[j] += Load(c, origin + j * c.column);
    }
    if (c.dtype != DType::kF32) {
      uint16_t* to = static_cast<uint16_t*>(c.data) + origin;
      if (c.column == 1) {
        Round(from, columns, c.dtype, to);
      } else {
        for (int64_t j = 0; j < columns; ++j) Round(from + j, 1, c.dtype, to + j * c.column);
      }
    } else {
      float* to = static_cast<float*>(c.data) + origin;
      for (int64_t j = 0; j < columns; ++j) to[j * c.column] = from[j];
    }
  }
}

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

void JGG_GEMM(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, const Matrix& c,
              bool accumulate, float* scratch) {
  static_assert(kBlockM % kRows == 0 && kBlockN % kColumns == 0);
  float* packed_a = scratch;
  float* packed_b = packed_a + kBlockM * kBlockK;
  float* sum = packed_b + kBlockK * kBlockN;
  for (int64_t n0 = 0; n0 < n; n0 += kBlockN) {
    const int64_t nb = Min(kBlockN, n - n0);
    for (int64_t m0 = 0; m0 < m; m0 += kBlockM) {
      const int64_t mb = Min(kBlockM, m - m0);
      for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
        const int64_t kb = Min(kBlockK, k - k0);
        Pack<kRows>(a, m0 * a.row + k0 * a.column, kb, a.column, mb, a.row, packed_a);
        Pack<kColumns>(b, k0 * b.row + n0 * b.column, kb, b.row, nb, b.column, packed_b);
        for (int64_t i = 0; i < mb; i += kRows) {
          for (int64_t j = 0; j < nb; j += kColumns) {
            Kernel(kb, packed_a + i * kb, packed_b + j * kb, sum + i * kBlockN + j, k0 > 0);
          }
        }
      }
      if (k == 0) memset(sum, 0, kBlockM * kBlockN * sizeof(float));
      Store(c, m0, n0, mb, nb, sum, accumulate);
    }
  }
}

}  // namespace jgg::cpu

// C = the sum of A B: blocks of A and B are packed as float32 in the order in which the inner
// kernel reads them; the inner kernel keeps a kRows x 16 tile of C in registers.
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
// out[strip][first index][kWidth], zeros past the end. `first` and `second` are element strides;
// strips have room for `depth` of the first index.
template <int kWidth, typename T>
void PackRuns(const T* in, int64_t first_count, int64_t first, int64_t second_count, int64_t second,
              int64_t depth, float* out) {
  const int64_t whole = second_count / kWidth * kWidth;
  if (second == 1) {
    // Along memory, across the strips: long runs of one row at a time.
    for (int64_t i = 0; i < first_count; ++i) {
      for (int64_t strip = 0; strip < whole; strip += kWidth) {
        const T* from = in + i * first + strip;
        float* to = out + strip * depth + i * kWidth;
        for (int j = 0; j < kWidth; ++j) to[j] = Widen(from[j]);
      }
    }
  } else {
    for (int64_t strip = 0; strip < whole; strip += kWidth) {
      const T* from = in + strip * second;
      float* to = out + strip * depth;
      for (int64_t i = 0; i < first_count; ++i) {
        for (int j = 0; j < kWidth; ++j) to[i * kWidth + j] = Widen(from[i * first + j * second]);
      }
    }
  }
  if (whole == second_count) return;
  const T* from = in + whole * second;
  float* to = out + whole * depth;
  for (int64_t i = 0; i < first_count; ++i) {
    for (int64_t j = 0; j < kWidth; ++j) {
      const bool inside = j < second_count - whole;
      to[i * kWidth + j] = inside ? Widen(from[i * first + j * second]) : 0.0f;
    }
  }
}

template <int kWidth, typename T>
void PackAs(const Matrix& matrix, int64_t origin, int64_t first_count, int64_t first,
            int64_t second_count, int64_t second, int64_t depth, float* out) {
  const T* in = static_cast<const T*>(matrix.data) + origin;
  PackRuns<kWidth>(in, first_count, first, second_count, second, depth, out);
}

template <int kWidth>
void Pack(const Matrix& matrix, int64_t origin, int64_t first_count, int64_t first,
          int64_t second_count, int64_t second, int64_t depth, float* out) {
  const auto pack = matrix.dtype == DType::kF32    ? PackAs<kWidth, float>
                    : matrix.dtype == DType::kBF16 ? PackAs<kWidth, Bf16>
                                                   : PackAs<kWidth, F16>;
  pack(matrix, origin, first_count, first, second_count, second, depth, out);
}

// sum[kRows][kBlockN stride] (+)= a[k][kRows]^T b[k][16]. The block's own sum begins at zero.
void Kernel(int64_t k, const float* a, const float* b, float* sum, bool accumulate) {
  Vector acc[kRows][kParts];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) acc[i][j] = Vector{};
    __builtin_prefetch(sum + i * kBlockN, 1);  // a line, which is needed at the end
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
    Vector* to = reinterpret_cast<Vector*>(sum + i * kBlockN);
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) to[j] = accumulate ? to[j] + acc[i][j] : acc[i][j];
  }
}

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }

// A tile of C.
struct Tile {
  int64_t row, column, rows, columns;
};

void Store(const Matrix& c, const Tile& tile, const float* sum) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t origin = (tile.row + i) * c.row + tile.column * c.column;
    const float* from = sum + i * kBlockN;
    if (c.dtype != DType::kF32) {
      uint16_t* to = static_cast<uint16_t*>(c.data) + origin;
      if (c.column == 1) {
        Round(from, tile.columns, c.dtype, to);
      } else {
        for (int64_t j = 0; j < tile.columns; ++j) Round(from + j, 1, c.dtype, to + j * c.column);
      }
    } else {
      float* to = static_cast<float*>(c.data) + origin;
      for (int64_t j = 0; j < tile.columns; ++j) to[j * c.column] = from[j];
    }
  }
}

// Zeros, which are zero bytes in every dtype.
void Clear(const Matrix& c, const Tile& tile) {
  const int64_t size = Size(c.dtype);
  for (int64_t i = 0; i < tile.rows; ++i) {
    char* to =
        static_cast<char*>(c.data) + ((tile.row + i) * c.row + tile.column * c.column) * size;
    if (c.column == 1) {
      memset(to, 0, tile.columns * size);
    } else {
      for (int64_t j = 0; j < tile.columns; ++j) memset(to + j * c.column * size, 0, size);
    }
  }
}

// One after another, parts of at most kBlockK of k of the products that reach a tile. Parts of
// neighbouring products that have the same rows of C make one block.
class Blocks {
 public:
  Blocks(const Products& products, const Tile& tile) : products_(products), tile_(tile) { Find(); }

  // The next block, packed; false when there is none. Its rows of the tile are [first, end).
  bool Next(Scratch* scratch) {
    if (index_ == products_.count) return false;
    first = first_;
    end = end_;
    depth = 0;
    int count = 0;
    do {
      Part& part = parts_[count++];
      part = {product_, done_, Min(kBlockK - depth, product_.k - done_)};
      depth += part.k;
      done_ += part.k;
      if (done_ == product_.k) {
        ++index_;
        Find();
      }
    } while (depth < kBlockK && index_ < products_.count && first_ == first && end_ == end);
    int64_t at = 0;
    for (int i = 0; i < count; ++i) {
      const Part& part = parts_[i];
      const Matrix &a = part.product.a, &b = part.product.b;
      const int64_t row = tile_.row + first - part.product.row;
      Pack<kRows>(a, row * a.row + part.first * a.column, part.k, a.column, end - first, a.row,
                  depth, scratch->a + at * kRows);
      Pack<kColumns>(b, part.first * b.row + tile_.column * b.column, part.k, b.row, tile_.columns,
                     b.column, depth, scratch->b + at * kColumns);
      at += part.k;
    }
    return true;
  }

  int64_t first = 0, end = 0, depth = 0;

 private:
  struct Part {
    Product product;
    int64_t first, k;
  };

  // The first product from index_ on that has something in the tile.
  void Find() {
    done_ = 0;
    for (; index_ < products_.count; ++index_) {
      product_ = products_.at(products_.context, index_);
      first_ = Max(product_.row - tile_.row, 0);
      end_ = Min(product_.row + product_.rows - tile_.row, tile_.rows);
      if (product_.k > 0 && first_ < end_) return;
    }
  }

  const Products& products_;
  const Tile& tile_;
  int64_t index_ = 0, done_ = 0;  // of the products, and of k of this one
  Product product_;               // number index_
  int64_t first_ = 0, end_ = 0;   // its rows of the tile
  Part parts_[kBlockK];           // each has one k at least
};

// total[first, end) += sum. The first time, total is not yet anything.
void AddTo(double* total, const Tile& tile, const float* sum, int64_t first, int64_t end,
           bool is_first) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    double* to = total + i * kBlockN;
    const float* from = sum + (i - first) * kBlockN;
    const bool inside = first <= i && i < end;
    if (!inside) {
      if (is_first) memset(to, 0, tile.columns * sizeof(double));
    } else if (is_first) {
      for (int64_t j = 0; j < tile.columns; ++j) to[j] = from[j];
    } else {
      for (int64_t j = 0; j < tile.columns; ++j) to[j] += from[j];
    }
  }
}

void RunTile(const Products& products, const Matrix& c, const Tile& tile, Scratch* scratch) {
  Blocks blocks(products, tile);
  int64_t first = 0, end = 0, in_sum = 0;  // what scratch->sum holds: rows, and how many blocks
  bool any_total = false;
  while (blocks.Next(scratch)) {
    if (in_sum == kBlocksOfSum || (in_sum > 0 && (blocks.first != first || blocks.end != end))) {
      AddTo(scratch->total, tile, scratch->sum, first, end, !any_total);
      any_total = true;
      in_sum = 0;
    }
    first = blocks.first;
    end = blocks.end;
    for (int64_t i = 0; i < end - first; i += kRows) {
      for (int64_t j = 0; j < tile.columns; j += kColumns) {
        Kernel(blocks.depth, scratch->a + i * blocks.depth, scratch->b + j * blocks.depth,
               scratch->sum + i * kBlockN + j, in_sum > 0);
      }
    }
    ++in_sum;
  }
  if (in_sum == 0) return Clear(c, tile);
  if (any_total || first > 0 || end < tile.rows) {
    AddTo(scratch->total, tile, scratch->sum, first, end, !any_total);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const double* from = scratch->total + i * kBlockN;
      float* to = scratch->sum + i * kBlockN;
      for (int64_t j = 0; j < tile.columns; ++j) to[j] = static_cast<float>(from[j]);
    }
  }
  Store(c, tile, scratch->sum);
}

}  // namespace

void JGG_GEMM(int64_t m, int64_t n, const Products& products, const Matrix& c, Scratch* scratch) {
  static_assert(kBlockM % kRows == 0 && kBlockN % kColumns == 0);
  for (int64_t n0 = 0; n0 < n; n0 += kBlockN) {
    for (int64_t m0 = 0; m0 < m; m0 += kBlockM) {
      RunTile(products, c, {m0, n0, Min(kBlockM, m - m0), Min(kBlockN, n - n0)}, scratch);
    }
  }
}

}  // namespace jgg::cpu

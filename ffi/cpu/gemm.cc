// C = the sum of A B: blocks of A and B are packed as float32 in the order in which the inner
// kernel reads them; the inner kernel keeps a kRows x 16 tile of C in registers.
//
// CMake compiles this file once per instruction set, with JGG_GEMM naming the function. Nothing
// here may call a template or an inline function of another header: the linker keeps one copy of
// such a function, and that copy could have instructions that the processor lacks.

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
  // Converts subnormals from integers: as float32 subnormals they could be flushed to zero.
  if (magnitude < 0x400u) return FromBits(sign | 0x3f800000u) * (magnitude * 0x1p-24f);
  const uint32_t exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;  // Inf and NaN
  return FromBits(sign | ((magnitude << 13) + exponent));
}

typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int QuadIndex __attribute__((vector_size(16)));

#if defined(__clang__)
#define JGG_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JGG_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, QuadIndex{__VA_ARGS__})
#endif

template <typename T>
Quad LoadQuad(const T* in) {
  return Quad{Widen(in[0]), Widen(in[1]), Widen(in[2]), Widen(in[3])};
}

// to[i * stride + j] = lines[j][first + i] for i and j below 4.
template <typename T>
void TransposeQuads(const T* const* lines, int64_t first, float* to, int64_t stride) {
  const Quad a = LoadQuad(lines[0] + first), b = LoadQuad(lines[1] + first),
             c = LoadQuad(lines[2] + first), d = LoadQuad(lines[3] + first);
  const Quad ab_low = JGG_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = JGG_SHUFFLE(a, b, 2, 6, 3, 7);
  const Quad cd_low = JGG_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = JGG_SHUFFLE(c, d, 2, 6, 3, 7);
  *reinterpret_cast<Quad*>(to) = JGG_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
  *reinterpret_cast<Quad*>(to + stride) = JGG_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
  *reinterpret_cast<Quad*>(to + 2 * stride) = JGG_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
  *reinterpret_cast<Quad*>(to + 3 * stride) = JGG_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
}

// A line that does not exist reads these zeros, whatever its dtype.
const float kZeros[kBlockN] = {};

// Some of a matrix's indices along one axis.
struct Axis {
  int64_t stride;  // elements from one index to the next
  int64_t start, count;
  const int32_t* list = nullptr;
};

// Where the lines of one axis begin, by index. `data` is at the first element of line 0.
template <typename T>
struct Lines {
  const T* data;
  const Axis axis;
  int64_t lines;  // in memory, where they come by list

  const T* operator[](int64_t i) const {
    int64_t line = axis.start + i;
    if (axis.list != nullptr) {
      line = axis.list[line];
      if (line < 0 || line >= lines) return reinterpret_cast<const T*>(kZeros);
    }
    return data + line * axis.stride;
  }
};

// Packs second.count x first.count elements in strips of kWidth of the second index:
// out[strip][first index][kWidth], zeros past the end. Strips have room for `depth` of the first
// index. If an axis has a stride other than 1, its indices name lines, which run along the other
// axis and may come by list.
template <int kWidth, typename T>
void PackAs(const Matrix& matrix, const Axis& first, const Axis& second, int64_t depth,
            float* out) {
  const T* in = static_cast<const T*>(matrix.data);
  const int64_t whole = second.count / kWidth * kWidth;
  if (second.stride == 1 && second.list == nullptr) {
    // Along memory, across the strips: long runs of one line at a time.
    const Lines<T> lines{in + second.start, first, matrix.lines};
    for (int64_t i = 0; i < first.count; ++i) {
      const T* line = lines[i];
      for (int64_t strip = 0; strip < whole; strip += kWidth) {
        float* to = out + strip * depth + i * kWidth;
        for (int j = 0; j < kWidth; ++j) to[j] = Widen(line[strip + j]);
      }
      if (whole == second.count) continue;
      float* to = out + whole * depth + i * kWidth;
      for (int64_t j = 0; j < kWidth; ++j) {
        to[j] = j < second.count - whole ? Widen(line[whole + j]) : 0.0f;
      }
    }
    return;
  }
  // Across memory: 4 x 4 elements at a time where the first index runs along it.
  constexpr int kQuads = kWidth / 4 * 4, kChunk = 16;
  const Lines<T> lines{in + first.start * first.stride, second, matrix.lines};
  for (int64_t strip = 0; strip < second.count; strip += kWidth) {
    float* to = out + strip * depth;
    const T* line[kWidth];
    for (int j = 0; j < kWidth; ++j) {
      line[j] = strip + j < second.count ? lines[strip + j] : nullptr;
    }
    const int64_t chunks = first.stride == 1 && strip < whole ? first.count / kChunk * kChunk : 0;
    for (int64_t chunk = 0; chunk < chunks; chunk += kChunk) {
      for (int j = 0; j < kQuads; j += 4) {
        for (int64_t i = chunk; i < chunk + kChunk; i += 4) {
          TransposeQuads(line + j, i, to + i * kWidth + j, kWidth);
        }
      }
      for (int j = kQuads; j < kWidth; ++j) {
        for (int64_t i = chunk; i < chunk + kChunk; ++i) to[i * kWidth + j] = Widen(line[j][i]);
      }
    }
    for (int64_t i = chunks; i < first.count; ++i) {
      for (int j = 0; j < kWidth; ++j) {
        to[i * kWidth + j] = line[j] == nullptr ? 0.0f : Widen(line[j][i * first.stride]);
      }
    }
  }
}

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }

// Part of a line of a source, in `buffer`, which has room for two units more.
const float* Read(const Matrix& matrix, int64_t line, int64_t first, int64_t count, float* buffer) {
  const int64_t before = (matrix.element + first) % kUnit;
  matrix.source->read(matrix.source->context, matrix.line + line, matrix.element + first - before,
                      before + count, buffer);
  return buffer + before;
}

// PackAs of lines that a source makes: B may have one.
void PackSource(const Matrix& matrix, const Axis& first, const Axis& second, int64_t depth,
                float* out) {
  constexpr int kWidth = kColumns;
  constexpr int64_t kLine = kBlockK + 2 * kUnit;
  alignas(64) float buffer[kWidth * kLine];
  if (second.stride == 1) {
    static_assert(sizeof buffer >= (kBlockN + 2 * kUnit) * sizeof *buffer);
    for (int64_t i = 0; i < first.count; ++i) {
      const float* line = Read(matrix, first.start + i, second.start, second.count, buffer);
      PackAs<kWidth, float>({const_cast<float*>(line), 0, 1, DType::kF32}, {0, 0, 1},
                            {1, 0, second.count}, depth, out + i * kWidth);
    }
    return;
  }
  for (int64_t strip = 0; strip < second.count; strip += kWidth) {
    const int64_t count = Min(kWidth, second.count - strip);
    const float* lines = nullptr;  // the first; others are as far into their part of the buffer
    for (int64_t j = count - 1; j >= 0; --j) {
      lines = Read(matrix, second.start + strip + j, first.start, first.count, buffer + j * kLine);
    }
    PackAs<kWidth, float>({const_cast<float*>(lines), kLine, 1, DType::kF32}, {1, 0, first.count},
                          {kLine, 0, count}, depth, out + strip * depth);
  }
}

template <int kWidth>
void Pack(const Matrix& matrix, const Axis& first, const Axis& second, int64_t depth, float* out) {
  if constexpr (kWidth == kColumns) {
    if (matrix.source != nullptr) return PackSource(matrix, first, second, depth, out);
  }
  const auto pack = matrix.dtype == DType::kF32    ? PackAs<kWidth, float>
                    : matrix.dtype == DType::kBF16 ? PackAs<kWidth, Bf16>
                                                   : PackAs<kWidth, F16>;
  pack(matrix, first, second, depth, out);
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

// Writes zeros, which are zero bytes in every dtype.
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

// Cuts the products that reach a tile into parts of at most kBlockK of k, one after another. Parts
// of neighbouring products that have the same rows of C make one block.
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
      Pack<kRows>(a, {a.column, part.first, part.k, a.columns}, {a.row, row, end - first, a.rows},
                  depth, scratch->a + at * kRows);
      Pack<kColumns>(b, {b.row, part.first, part.k, b.rows},
                     {b.column, tile_.column, tile_.columns, b.columns}, depth,
                     scratch->b + at * kColumns);
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

  // Finds the first product from index_ on that has something in the tile.
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

// total[first, end) += sum. The first time, total holds nothing yet.
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

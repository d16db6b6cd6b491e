// Lines of quantized weights: decoding, and products with a few rows.
//
// CMake compiles this file once per instruction set, with JGG_LINES naming the kernels, and without
// contracting products and sums: affine values are products that are rounded, and then sums. As in
// gemm.cc, nothing here may call a function of another header that has no copy of its own here.

#include "cpu/lines.h"

#include "cpu/row.h"

#ifndef JGG_LINES
#define JGG_LINES kLinesBaseline
#endif

namespace jgg::cpu {
namespace {

// ---- rows of numbers ----

void Widen(const void* in, DType dtype, int64_t count, float* out) {
  const int size = SizeOf(dtype);
  const uint8_t* at = static_cast<const uint8_t*>(in);
  for (int64_t i = 0; i < WholeUnits(count); i += kLanes) {
    uint8_t some[kLanes * 4] = {};
    const uint8_t* from = at + i * size;
    if (i + kLanes > count) {
      if (i < count) memcpy(some, from, (count - i) * size);
      from = some;
    }
    Store(out + i, LoadFloats(from, dtype));
  }
}

void Narrow(const float* in, int64_t count, DType dtype, void* out) {
  const int size = SizeOf(dtype);
  uint8_t* const to = static_cast<uint8_t*>(out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreAs(Load(in + i), dtype, to + i * size);
  if (i == count) return;
  float some[kLanes] = {};
  uint8_t narrow[kLanes * 4];
  memcpy(some, in + i, (count - i) * sizeof *in);
  StoreAs(Load(some), dtype, narrow);
  memcpy(to + i * size, narrow, (count - i) * size);
}

// ---- products with a few rows ----

constexpr int kTogether = 8;    // lines that are decoded, then multiplied
constexpr int64_t kPart = 512;  // elements of each at a time
constexpr int64_t kMostPerSum = kLongestSum * kLanes;

// acc[l][r] += lines l of w times row r of x, of kRows rows. All lines at once or half of them: as
// many sums as hide the time that one takes, and registers hold.
template <int kRows>
void MultiplyPart(const float* w, const float* x, int64_t stride, int64_t count,
                  Vector (*acc)[kMostFewRows]) {
  constexpr int kLines = kRows == 1 ? kTogether : kTogether / 2;
  for (int first = 0; first < kTogether; first += kLines) {
    Vector sum[kLines][kRows];
    for (int l = 0; l < kLines; ++l) {
      for (int r = 0; r < kRows; ++r) sum[l][r] = acc[first + l][r];
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      Vector row[kRows];
      for (int r = 0; r < kRows; ++r) row[r] = Load(x + r * stride + i);
      for (int l = 0; l < kLines; ++l) {
        const Vector v = Load(w + (first + l) * kPart + i);
        for (int r = 0; r < kRows; ++r) sum[l][r] = MultiplyAdd(v, row[r], sum[l][r]);
      }
    }
    for (int l = 0; l < kLines; ++l) {
      for (int r = 0; r < kRows; ++r) acc[first + l][r] = sum[l][r];
    }
  }
}

constexpr int64_t kMostOrdered = 16384;  // numbers of x that are put in another order at a time
constexpr int64_t kMostTotals = 128;

// At most kMostTotals lines.
void MultiplyRow(const Lines& lines, int64_t first, int64_t count, const float* x, float* out) {
  const Decoders decoders = DecodersOf(lines);
  const Ahead ahead(lines);
  alignas(64) float ordered[kMostOrdered];
  double total[kMostTotals] = {};
  for (int64_t begin = 0; begin < lines.elements; begin += kMostOrdered) {
    const int64_t end = Min(begin + kMostOrdered, lines.elements);
    const float* row = x + begin;
    if (decoders.order != nullptr) {
      decoders.order(row, end - begin, ordered);
      row = ordered;
    }
    for (int64_t k = begin; k < end; k += kMostPerSum) {
      const int64_t some = Min(kMostPerSum, end - k);
      const float* const part = row + (k - begin);
      for (int64_t i = 0; i < count;) {
        Vector sums[kLinesTogether];
        if (i + kLinesTogether <= count &&
            decoders.multiply_lines(lines, first + i, k, some, part, ahead, sums)) {
          for (const Vector& sum : sums) total[i++] += Sum(sum);
        } else {
          total[i] += Sum(decoders.multiply(lines, first + i, k, some, part, ahead));
          ++i;
        }
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(total[i]);
}

void Multiply(const Lines& lines, int64_t first, int64_t count, const FewRows& x, float* out,
              int64_t stride) {
  // A line that ends within a unit may have NaN behind it.
  if (x.count == 1 && lines.elements % kUnit == 0) {
    for (int64_t i = 0; i < count; i += kMostTotals) {
      MultiplyRow(lines, first + i, Min(kMostTotals, count - i), x.data, out + i);
    }
    return;
  }
  const LineKernels::Read decode = Decoder(lines);
  alignas(64) float w[kTogether * kPart] = {};
  Vector acc[kTogether][kMostFewRows];
  double total[kTogether][kMostFewRows];
  for (int64_t line = first; line < first + count; line += kTogether) {
    const int64_t together = Min(kTogether, first + count - line);
    memset(total, 0, sizeof total);
    for (int64_t begin = 0; begin < lines.elements; begin += kMostPerSum) {
      const int64_t end = Min(begin + kMostPerSum, lines.elements);
      memset(acc, 0, sizeof acc);
      for (int64_t k = begin; k < end; k += kPart) {
        const int64_t some = Min(kPart, end - k);
        for (int64_t l = 0; l < together; ++l) {
          decode(&lines, line + l, k, some, w + l * kPart);
          for (int64_t i = some; i < WholeUnits(some); ++i) w[l * kPart + i] = 0.0f;
        }
        const int64_t whole = WholeUnits(some);
        for (int64_t r = 0; r < x.count;) {
          const float* const rows = x.data + r * x.stride + k;
          auto* const sums = reinterpret_cast<Vector(*)[kMostFewRows]>(&acc[0][r]);
          if (x.count - r >= 4) {
            MultiplyPart<4>(w, rows, x.stride, whole, sums);
            r += 4;
          } else if (x.count - r >= 2) {
            MultiplyPart<2>(w, rows, x.stride, whole, sums);
            r += 2;
          } else {
            MultiplyPart<1>(w, rows, x.stride, whole, sums);
            r += 1;
          }
        }
      }
      for (int64_t l = 0; l < together; ++l) {
        for (int64_t r = 0; r < x.count; ++r) total[l][r] += Sum(acc[l][r]);
      }
    }
    for (int64_t l = 0; l < together; ++l) {
      for (int64_t r = 0; r < x.count; ++r) {
        out[r * stride + line - first + l] = static_cast<float>(total[l][r]);
      }
    }
  }
}

constexpr int kAddTogether = 4;  // lines, likewise

// sum += the lines of w, each times its number of x.
void AddPart(const float* w, const float* x, int64_t count, float* sum) {
  Vector number[kAddTogether];
  for (int l = 0; l < kAddTogether; ++l) number[l] = All(x[l]);
  for (int64_t i = 0; i < count; i += kLanes) {
    Vector v = Load(sum + i);
    for (int l = 0; l < kAddTogether; ++l) v = MultiplyAdd(Load(w + l * kPart + i), number[l], v);
    Store(sum + i, v);
  }
}

// Elements of lines times numbers, in one pass over the lines: one row of x.
void AddRow(const Lines& lines, int64_t line, int64_t count, int64_t first, int64_t elements,
            const float* x, float* out) {
  const Decoders decoders = DecodersOf(lines);
  const Ahead ahead(lines);
  alignas(64) float sum[kMostAdds];
  double total[kMostAdds];
  const int64_t width = WholeUnits(elements);
  memset(total, 0, sizeof *total * width);
  for (int64_t begin = 0; begin < count; begin += kLongestSum) {
    memset(sum, 0, sizeof *sum * width);
    for (int64_t i = begin; i < Min(begin + kLongestSum, count);) {
      if (i + kLinesTogether <= count &&
          decoders.add_lines(lines, line + i, first, elements, x + i, ahead, sum)) {
        i += kLinesTogether;
      } else {
        decoders.add(lines, line + i, first, elements, x[i], sum, ahead);
        ++i;
      }
    }
    for (int64_t i = 0; i < width; ++i) total[i] += sum[i];
  }
  for (int64_t i = 0; i < width; ++i) {
    const int64_t at = i / kLanes * kLanes + decoders.place(i % kLanes);
    if (at < elements) out[at] = static_cast<float>(total[i]);
  }
}

void Add(const Lines& lines, int64_t line, int64_t count, int64_t first, int64_t elements,
         const FewRows& x, float* out, int64_t stride) {
  if (x.count == 1) return AddRow(lines, line, count, first, elements, x.data, out);
  const LineKernels::Read decode = Decoder(lines);
  alignas(64) float w[kAddTogether * kPart], sum[kMostAdds];
  double total[kMostAdds];
  const int64_t width = WholeUnits(elements), all = x.count * width;
  memset(total, 0, sizeof *total * all);
  for (int64_t begin = 0; begin < count; begin += kLongestSum) {
    memset(sum, 0, sizeof *sum * all);
    for (int64_t i = begin; i < Min(begin + kLongestSum, count); i += kAddTogether) {
      const int64_t together = Min(kAddTogether, count - i);
      for (int64_t part = 0; part < elements; part += kPart) {
        const int64_t some = Min(kPart, elements - part), whole = WholeUnits(some);
        for (int64_t l = 0; l < kAddTogether; ++l) {
          if (l < together) {
            decode(&lines, line + i + l, first + part, some, w + l * kPart);
          } else {
            memset(w + l * kPart, 0, sizeof *w * whole);
          }
        }
        for (int64_t r = 0; r < x.count; ++r) {
          float number[kAddTogether] = {};
          for (int64_t l = 0; l < together; ++l) number[l] = x.data[r * x.stride + i + l];
          AddPart(w, number, whole, sum + r * width + part);
        }
      }
    }
    for (int64_t i = 0; i < all; ++i) total[i] += sum[i];
  }
  for (int64_t r = 0; r < x.count; ++r) {
    for (int64_t i = 0; i < elements; ++i) {
      out[r * stride + i] = static_cast<float>(total[r * width + i]);
    }
  }
}

}  // namespace

extern const LineKernels JGG_LINES = {
    kLanes == 16 ? 32 : 16, Decoder, Widen, Narrow, Multiply, Add};

}  // namespace jgg::cpu

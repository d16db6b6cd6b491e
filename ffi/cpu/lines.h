// Lines of weights, quantized or not, on one thread: as float32 numbers, and times a few rows.
// Compiled once per instruction set, as gemm.h.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/gemm.h"
#include "quantized/formats.h"

namespace jgg::cpu {

// The lines of all matrices, one after another; each has `elements` codes.
// quantized/quantized.h is what GPUs have.
struct Lines {
  Mode mode;
  int bits;
  bool array;         // codes are numbers of scale_dtype, without scales
  DType scale_dtype;  // of scales and biases that are floats
  DType rounds;       // what values are rounded to; kF32: they are not
  int64_t elements, line_bytes;
  int64_t group;   // codes that share a scale
  int group_bits;  // their number's logarithm; -1: it is no power of two
  const uint8_t *codes, *codes_end;
  const uint8_t *scales, *scales_end, *biases;  // biases are shaped like scales
  int64_t line_scales;                          // scales of a line
  int64_t lines, lines_each, blocks;            // of a matrix; that share scales; those of a matrix
  const float* factors;                         // a matrix's global scale, or null
  int64_t factor_stride;
};

// Rows that meet the lines of a matrix. `data` is float32, in lines of `stride`; what is behind
// the last k, up to a whole kUnit, is zeros.
struct FewRows {
  const float* data;
  int64_t stride, count;
};
constexpr int64_t kMostFewRows = 32, kMostAddRows = 16, kMostArrayAddRows = 8;

struct LineKernels {
  // Up to so many rows `multiply` is faster than Gemm, as `add` is up to kMostAddRows, or of arrays
  // up to kMostArrayAddRows.
  int64_t few_rows;
  // A Source's function, of which `context` is Lines.
  using Read = decltype(Source::read);
  Read (*decoder)(const Lines& lines);
  // `count` numbers as float32, and zeros up to a whole unit.
  void (*widen)(const void* in, DType dtype, int64_t count, float* out);
  // Numbers rounded to a dtype; NaN has one pattern.
  void (*narrow)(const float* in, int64_t count, DType dtype, void* out);
  // out[r, i] = x[r] . lines[first + i], i < count. Lines of `out` are `stride` apart.
  void (*multiply)(const Lines& lines, int64_t first, int64_t count, const FewRows& x, float* out,
                   int64_t stride);
  // out[r, i] = the sum over l < count of x[r, l] * lines[line + l][first + i], i < elements. Lines
  // of `out` are `stride` apart. There are at most kMostAdds sums, of whole units of elements.
  void (*add)(const Lines& lines, int64_t line, int64_t count, int64_t first, int64_t elements,
              const FewRows& x, float* out, int64_t stride);
};
constexpr int64_t kMostAdds = 8192;

// How a sum of any length stays right, as gemm.h: each lane adds up kLongestSum float32 products,
// and such sums are added up as float64.
constexpr int64_t kLongestSum = 128;

extern const LineKernels kLinesBaseline;
#ifdef JGG_X86_LEVELS
extern const LineKernels kLinesV3, kLinesV4;
#endif

// The best of these on this processor.
const LineKernels& BestLines();

}  // namespace jgg::cpu

// The generic GPU kernel of qmm: the tiles, schedule and epilogue of grouped_mm/gemm_sm80.h, with a
// quantized B that is decoded slice by slice.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "grouped_mm/gemm_sm80.h"
#include "quantized/quantized.h"

namespace jgg {

// How the codes of a slice of W lie in the ring, line after line, and how they get there.
struct SliceShape {
  int width;        // bytes per copy: 16 or 4
  int copies;       // per line
  int column_bits;  // threads side by side along a line: 2^column_bits >= copies
  int step, steps;  // lines from one copy of a thread to its next, and its copies
  int pitch;        // bytes from one line to the next

  // An odd number of 16 bytes, so that reads of neighbouring lines meet few banks twice; lines of
  // 32 codes, which one thread reads, need no such care.
  static constexpr SliceShape Of(int lines, int elements, int threads, int bits, int width,
                                 bool one_more) {
    SliceShape shape{width, elements / 8 * bits / width + one_more, 0, 0, 0, 0};
    while (1 << shape.column_bits < shape.copies) ++shape.column_bits;
    shape.step = threads >> shape.column_bits;
    shape.steps = (lines + shape.step - 1) / shape.step;
    shape.pitch = elements == 32 ? 4 * bits : ((shape.copies * width + 15) / 16 | 1) * 16;
    return shape;
  }
};

// Numbers that a launch works out for W and its tile.
struct PackedSlice {
  SliceShape shape;
  int bytes;           // of a slice and its scales in the ring
  int64_t line_bytes;  // codes of a line of W
  int64_t step_bytes;  // shape.step lines
  int64_t next;        // from a slice to the next
  int64_t scale_line;  // scales of a line, in bytes
  int64_t biases;      // bytes from a scale to its bias, where there is one
  int scale_bytes;     // of one scale
  int group_bits;      // 2^group_bits codes share it
  int share_bits;      // of the 32s of codes that a thread decodes 2^share_bits share it
  int scale_words;     // in which the scales of a thread are, wherever they begin
  int half;            // columns of the tile in either half of N, or all of them
  int64_t between;     // columns of N between the halves of a tile
  // Gated: bytes by which the halves of the tile are farther apart in W than here, and the rest
  // that copies cannot express, because they begin at multiples of 4 bytes.
  int64_t upper;
  int misaligned;
  bool split;  // groups begin anywhere within what a thread decodes of the upper half
};

struct QuantizedGemmSm80 {
  GemmSm80 gemm;  // A and the result; b is not used
  QuantizedWeight w;
  PackedSlice slice;
};

// Rows of a segment, on average.
inline int64_t AverageRows(const QuantizedGemmSm80& gemm) {
  return gemm.gemm.rows_y / std::max<int64_t>(gemm.gemm.metadata.count, 1);
}

// Whether a tile may be a sum over segments that differ in their global scale.
constexpr bool SumsApart(const QuantizedGemmSm80& gemm) {
  return gemm.w.global_scale.data != nullptr && gemm.w.global_scale.group != 0 &&
         gemm.gemm.order != GemmSm80::Order::kSegments;
}

// Low tiles decode a weight once for every 16 rows, and some segments are longer than the average.
inline bool HasLowTiles(const QuantizedGemmSm80& gemm) {
  return AverageRows(gemm) <= 8 || gemm.gemm.rows_y <= 16 || SumsApart(gemm);
}

// K-major: lines of w are columns of the product.
cudaError_t LaunchQuantizedGemmSm80(cudaStream_t stream, const QuantizedGemmSm80& gemm, DType dtype,
                                    bool tf32, bool b_k_major);

// few_rows_sm80.cu: K-major weights, decoded in registers, for few bfloat16 rows. Whether rows are
// few, k is a multiple of 64 (of 32 for 8 bits), and copies begin where they should.
bool HasFewRowsSm80(const QuantizedGemmSm80& gemm);
cudaError_t LaunchFewRowsSm80(cudaStream_t stream, const QuantizedGemmSm80& gemm);

// Instances: gemm_sm80_instance.cu.
template <typename Element, bool kBKMajor>
cudaError_t LaunchQuantizedGemmSm80Instance(cudaStream_t stream, const QuantizedGemmSm80& gemm);

}  // namespace jgg

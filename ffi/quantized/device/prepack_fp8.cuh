// prepack of mode "fp8": codes in layout "linear", with a scale for each block of any shape, to
// layout "sm90", with a word for each row and 128 k (jax_groupgemm/_fp8/prepack.py).
#pragma once

#include "grouped_mm/segments.h"
#include "quantized/device/instructions.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

inline constexpr int kPrepackFp8Threads = 128;  // 64 rows
inline constexpr int kPrepackFp8Units = 4;      // of 128 k, of a block

struct PrepackFp8Params {
  const uint8_t* weight;  // (groups, n, k)
  const float* scales;    // (groups, scale_rows, scale_columns)
  uint8_t* out;
  uint32_t* out_scales;
  int32_t row_tiles, units;  // of a matrix: of 64 rows, of 128 k
  int32_t blocks_along_k;
  int32_t scale_rows, scale_columns;
  int32_t rows_each, units_each;  // that share a scale
  bool some;                      // of the matrices, those that metadata gives rows
  Metadata metadata;
};

// Segments that a warp looks through for each block of threads. Of more, a matrix is taken to have
// rows.
inline constexpr int kPrepackFp8Segments = 512;

// Whether a matrix may have rows; every lane of a warp asks. Rows that do not exist may count:
// matrices without rows are never read, so packing one too many costs time alone.
__device__ inline bool MayHaveRows(const Metadata& metadata, int64_t matrix) {
  const int32_t* data = metadata.data;
  if (metadata.kind == MetadataKind::kSizes) {
    const int64_t i = matrix + (metadata.offset == nullptr ? 0 : *metadata.offset);
    return i >= 0 && i < metadata.count && data[i] > 0;
  }
  if (metadata.kind == MetadataKind::kSpans) {
    return matrix < metadata.count && data[2 * matrix] < data[2 * matrix + 1];
  }
  if (metadata.count > kPrepackFp8Segments) return true;
  const auto* segments = reinterpret_cast<const Segment*>(data);
  const int count = static_cast<int>(metadata.count), weight = static_cast<int>(matrix);
  bool found = false;
  JGG_NO_UNROLL
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    found |= segments[i].weight == weight && segments[i].length > 0;
  }
  return __ballot_sync(~0u, found) != 0;
}

// The nearest bfloat16 of float32 bits: a finite number, an infinity, or the NaN that has no other
// bits.
JGG_HOST_DEVICE uint32_t BF16BitsOf(uint32_t bits) {
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The word of a scale: two bfloat16 numbers. Where one of the 128 codes is NaN, the lower one is
// NaN, and 15 bits of the scale are beside it.
JGG_HOST_DEVICE uint32_t Fp8ScaleWord(float scale, bool nan) {
  uint32_t bits = AsBits(Multiply(scale, 0x1p88f));
  if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fc00000;
  if (nan) {
    bits += 0xff + (bits >> 9 & 1);
    return (bits & 0xffff8000) | 0x7fc0 | (bits >> 9 & 0x3f);
  }
  const uint32_t high = BF16BitsOf(bits);
  if ((high & 0x7fff) >= 0x7f80) return high;
  return high | BF16BitsOf(AsBits(Add(AsFloat(bits), -AsFloat(high << 16)))) << 16;
}

// Two codes, bytes of a word, in the halves of a word as bfloat16 has signs and the other bits.
JGG_HOST_DEVICE uint32_t Fp8Pair(uint32_t codes, bool second) {
  const uint32_t bytes = Permute(0, codes, second ? 0x7060 : 0x5040);
  return (bytes & 0x80008000) | (bytes >> 4 & 0x07f007f0);
}

// Four pairs as two words: of rows r and r + 8, then both again, 8 k further on.
JGG_HOST_DEVICE void InterleaveFp8(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                   uint32_t (&words)[2]) {
  constexpr uint32_t kHigh = 0x87808780, kLast = 0x00700070;
  const auto high = [](uint32_t pair) { return FunnelLeft(pair & kHigh, pair & kHigh, 4); };
  words[0] = a | high(c) | (d & kLast) >> 4;
  words[1] = b | high(d) | (c & kLast) >> 4;
}

// 16 codes of two rows as what four threads have of them.
JGG_HOST_DEVICE void Fp8Step(const uint4& row, const uint4& row8, uint32_t (&threads)[4][2]) {
  JGG_UNROLL
  for (int j = 0; j < 4; ++j) {
    const bool second = j % 2 != 0, upper = j >= 2;
    InterleaveFp8(Fp8Pair(upper ? row.y : row.x, second), Fp8Pair(upper ? row8.y : row8.x, second),
                  Fp8Pair(upper ? row.w : row.z, second), Fp8Pair(upper ? row8.w : row8.z, second),
                  threads[j]);
  }
}

// Bit 7 of a byte is set where it is that of a NaN.
JGG_HOST_DEVICE uint32_t Fp8Nans(const uint4& codes) {
  const auto of = [](uint32_t word) { return (word & 0x7f7f7f7f) + 0x01010101; };
  return (of(codes.x) | of(codes.y) | of(codes.z) | of(codes.w)) & 0x80808080;
}

// One of two steps in which the lanes of a quad transpose: item j of lane i to item i of lane j.
template <int kMask>
__device__ void Exchange(uint32_t (&items)[4][2]) {
  const bool upper = threadIdx.x & kMask;
  JGG_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (j & kMask) continue;
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = items[j][i], &high = items[j + kMask][i];
      const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, kMask);
      if (upper) {
        low = got;
      } else {
        high = got;
      }
    }
  }
}

// A block has 64 rows of a matrix, a warp 16: of a tile of 64 k a lane reads a step, 16 k, of two
// rows, and what its quad has read it exchanges for its own codes.
__global__ void __launch_bounds__(kPrepackFp8Threads)
    PrepackFp8Kernel(const __grid_constant__ PrepackFp8Params p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, step = lane % 4;
  const auto tile_number = static_cast<int>(blockIdx.x / p.blocks_along_k);
  const int64_t row_tile = tile_number, matrix = tile_number / p.row_tiles;
  if (p.some && !MayHaveRows(p.metadata, matrix)) return;
  const int first = kPrepackFp8Units * static_cast<int>(blockIdx.x % p.blocks_along_k);
  const int end = min(first + kPrepackFp8Units, p.units);
  const int64_t row = 64 * row_tile + 16 * warp + quad;  // and row + 8
  const int64_t line = 8 * int64_t{p.units};             // of 16 codes
  const uint4* codes = reinterpret_cast<const uint4*>(p.weight) + row * line + step;
  // A quad's first two lanes write the words of its two rows' scales.
  const int n = static_cast<int>(row - matrix * p.row_tiles * 64) + 8 * (step & 1);
  const float* scales = p.scales + (matrix * p.scale_rows + n / p.rows_each) * p.scale_columns;
  uint32_t* words = p.out_scales + row_tile * p.units * 64 + 16 * warp + 2 * quad + (step & 1);
  uint4* out = reinterpret_cast<uint4*>(p.out) + row_tile * p.units * 512 + threadIdx.x;
  JGG_NO_UNROLL
  for (int unit = first; unit < end; ++unit) {
    uint4 rows[2][2];
    JGG_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      rows[tile][0] = __ldg(codes + 8 * unit + 4 * tile);
      rows[tile][1] = __ldg(codes + 8 * unit + 4 * tile + 8 * line);
    }
    const float scale = __ldg(scales + unit / p.units_each);
    uint32_t nans = Fp8Nans(rows[0][0]) | Fp8Nans(rows[1][0]);
    nans |= (Fp8Nans(rows[0][1]) | Fp8Nans(rows[1][1])) >> 1;
    nans |= __shfl_xor_sync(~0u, nans, 1);
    nans |= __shfl_xor_sync(~0u, nans, 2);
    const bool nan = (nans & (step & 1 ? 0x40404040 : 0x80808080)) != 0;
    if (step < 2) words[64 * int64_t{unit}] = Fp8ScaleWord(scale, nan);
    JGG_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t items[4][2];
      Fp8Step(rows[tile][0], rows[tile][1], items);
      Exchange<1>(items);
      Exchange<2>(items);
      uint4* to = out + 512 * int64_t{unit} + 256 * tile;
      to[0] = make_uint4(items[0][0], items[0][1], items[1][0], items[1][1]);
      to[128] = make_uint4(items[2][0], items[2][1], items[3][0], items[3][1]);
    }
  }
}

}  // namespace jgg::device

// Sums on their way through shared memory. They go from a warpgroup's registers to a chunk of rows
// of 64 columns, and from there to rows of the result.
//
// A thread's sums are of 2 columns (8 apart) and 2 neighbouring rows of every 8.
#pragma once

#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg::device {

// kRowsByList: rows of the result and of x come by list.
template <int kChunk_, bool kRowsByList = false>
class StagedSm90 {
 public:
  static constexpr int kChunk = kChunk_;

  __device__ explicit StagedSm90(const GemmSm90& gemm) : gemm_(gemm) {}

  // kRowsByList: where the rows of the next tile are in x and in the result, -1 for nowhere.
  __device__ void SetRows(const int* x_rows, const int* y_rows) {
    x_rows_ = x_rows;
    y_rows_ = y_rows;
  }

  // Rounds `blocks` times 8 rows of 64 columns to T, and writes them to `staged`. Pieces of 16
  // bytes are swizzled by the row.
  template <typename T>
  __device__ static void StageHalvesOf(const float* sums, char* staged, int blocks) {
    StageFours(staged, blocks,
               [&](int word) { return Pack<T>(sums[2 * word], sums[2 * word + 1]); });
  }

  // The same of sums that are rounded already, two a word.
  __device__ static void StageWords(const uint32_t* words, char* staged, int blocks) {
    StageFours(staged, blocks, [&](int word) { return words[word]; });
  }

  // Writes kRows rows of 32 floats, and then of the next 32, times `scale`. Pieces of 16 bytes are
  // swizzled by the row.
  template <int kRows>
  __device__ static void StageFloats(const float* sums, char* staged, int blocks,
                                     float scale = 1.0f) {
    float* to = reinterpret_cast<float*>(staged);
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      if (block >= blocks) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[FloatOffset<kRows>(8 * block + Lane() % 4 * 2 + i % 2, Column() + i / 2 * 8)] =
            sums[4 * block + i] * scale;
      }
    }
  }

 protected:
  // A result as tiles of it are stored: where the first row of one begins, and its tensor map.
  struct Target {
    void* data;
    int64_t begin, line;  // elements
    const CUtensorMap* map;
    int matrix;  // of the map
  };

  template <typename Words>
  __device__ static void StageFours(char* staged, int blocks, Words words) {
    // Lane l names a row of matrix l / 8 of the warp's 16 x 16, whose matrices begin at
    // (column, row) = (0, 0) (8, 0) (0, 8) (8, 8).
    const int row = Lane() % 8 + Lane() / 16 * 8;
    const int piece = (Thread() / 32 * 2 + Lane() / 8 % 2) ^ (row % 8);
    char* to = staged + row * 128 + piece * 16;
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (2 * i >= blocks) break;
      StoreMatrices<true>(to + i * 16 * 128, words(4 * i), words(4 * i + 1), words(4 * i + 2),
                          words(4 * i + 3));
    }
  }

  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int Thread() { return threadIdx.x % 128; }
  // This thread's first column of the 64.
  __device__ static int Column() { return Thread() / 32 * 16 + Lane() / 4; }

  // Row `row` of a tile, in elements from where its first begins.
  __device__ int64_t Line(int row, int64_t line) const {
    if constexpr (kRowsByList) return y_rows_[row] * line;
    return row * line;
  }

  // Which rows of a list are not stored, and which have products that are zeros.
  __device__ bool Nowhere(int row) const { return kRowsByList && y_rows_[row] < 0; }
  __device__ bool Missing(int row) const { return kRowsByList && x_rows_[row] < 0; }

  __device__ void StageHalves(const float* sums, char* staged, int blocks) const {
    if (gemm_.out_dtype == DType::kBF16) {
      StageHalvesOf<cutlass::bfloat16_t>(sums, staged, blocks);
    } else {
      StageHalvesOf<cutlass::half_t>(sums, staged, blocks);
    }
  }

  // Rows of a tile from `begin` on, 64 columns from `first_column` on.
  __device__ void WriteHalves(const char* staged, const Target& target, int first_column, int begin,
                              int rows, int columns) const {
    const int piece = Thread() % 8, first = Thread() / 8;
    const int column = piece * 8;
    if (column >= columns) return;
    uint16_t* to = static_cast<uint16_t*>(target.data) + target.begin + first_column + column;
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const int row = first + 16 * i;
      if (row >= rows || Nowhere(begin + row)) continue;
      uint4 values = *reinterpret_cast<const uint4*>(staged + row * 128 + (piece ^ (row % 8)) * 16);
      if constexpr (kRowsByList) {
        if (Missing(begin + row)) values = make_uint4(0, 0, 0, 0);
      }
      if (gemm_.out_width == 8) {
        *reinterpret_cast<uint4*>(to + Line(begin + row, target.line)) = values;
      } else {
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < columns) {
            to[Line(begin + row, target.line) + j] =
                static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
          }
        }
      }
    }
  }

  template <int kRows>
  __device__ static int FloatOffset(int row, int column) {
    return (column / 32 * kRows + row) * 32 + (column % 32 ^ (row % 8 * 4));
  }

  template <int kRows>
  __device__ static void ReadFour(const char* staged, int row, int column, float (&values)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(staged) +
                                                         FloatOffset<kRows>(row, column));
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
  }

  template <int kRows>
  __device__ void ReadProducts(const char* staged, int begin, int row, int column,
                               float (&values)[4]) const {
    ReadFour<kRows>(staged, row, column, values);
    if (Missing(begin + row)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = 0.0f;
    }
  }

  __device__ void WriteFloats(const char* staged, const Target& target, int first_column, int begin,
                              int rows, int columns) const {
    const int column = Thread() % 16 * 4;
    if (column >= columns) return;
#pragma unroll 4
    for (int row = Thread() / 16; row < rows; row += 8) {
      if (Nowhere(begin + row)) continue;
      float values[4];
      ReadProducts<kChunk>(staged, begin, row, column, values);
      WriteFour(target.begin + Line(begin + row, target.line) + first_column + column,
                columns - column, values);
    }
  }

  __device__ void WriteFour(int64_t at, int columns, const float (&values)[4]) const {
    if (gemm_.out_width > 1 && gemm_.out_dtype == DType::kF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(gemm_.out) + at) =
          make_float4(values[0], values[1], values[2], values[3]);
    } else if (gemm_.out_width > 1) {
      const bool bf16 = gemm_.out_dtype == DType::kBF16;
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(gemm_.out) + at) =
          bf16 ? make_uint2(Pack<cutlass::bfloat16_t>(values[0], values[1]),
                            Pack<cutlass::bfloat16_t>(values[2], values[3]))
               : make_uint2(Pack<cutlass::half_t>(values[0], values[1]),
                            Pack<cutlass::half_t>(values[2], values[3]));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < columns) StoreFloat(gemm_.out, at + j, gemm_.out_dtype, values[j]);
      }
    }
  }

  __device__ void AddExisting(int64_t at, int columns, float (&values)[4]) const {
    if (gemm_.out_width > 1 && gemm_.out_dtype == DType::kF32) {
      const float4 four = *reinterpret_cast<const float4*>(static_cast<float*>(gemm_.out) + at);
      values[0] += four.x;
      values[1] += four.y;
      values[2] += four.z;
      values[3] += four.w;
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < columns) values[j] += LoadFloat(gemm_.out, at + j, gemm_.out_dtype);
    }
  }

  const GemmSm90& gemm_;
  const int* x_rows_ = nullptr;
  const int* y_rows_ = nullptr;
};

}  // namespace jgg::device

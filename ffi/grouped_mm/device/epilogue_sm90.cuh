// From float32 sums in registers to the result: bias, activation, row scale, existing result,
// rounding. One warpgroup, 64 columns at a time.
//
// A thread's sums are of 2 columns (8 apart) and 2 neighbouring rows of every 8. They go through
// shared memory, kChunk rows at a time. Whole chunks leave by TMA; others in pieces of 16 bytes
// along a row, of which those outside the tile are left out: so tails are exact. Scattered rows,
// whose places in the result are a list, leave that way too, and float32; but see store_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cute/arch/copy_sm90.hpp"
#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg::device {

// A thread does so much of an epilogue to its own sums, as far as a kernel has registers. The rest
// goes through shared memory, row by row.
enum class Own { kNothing, kBias, kBiasAndScales };

// Shared memory for two chunks of two-byte results, or one of float32.
template <int kChunk_, bool kScattered = false, bool kUnrolled = false, Own kOwn = Own::kNothing>
class EpilogueSm90 {
 public:
  static constexpr int kChunk = kChunk_;
  static constexpr int kBytes = kChunk * 128 * 2;

  __device__ EpilogueSm90(const GemmSm90& gemm, void* staged, int barrier)
      : gemm_(gemm), staged_(static_cast<char*>(staged)), barrier_(barrier) {}

  // Scattered: where the rows of the next tile are in x and in the result, -1 for nowhere.
  __device__ void SetRows(const int* x_rows, const int* y_rows) {
    x_rows_ = x_rows;
    y_rows_ = y_rows;
  }

  // Store columns [column, column + 64) of a tile.
  //
  // Chunks are a loop that is not unrolled, so that there is little code: unrolled, 5 to 20 % of
  // all samples waited for instructions. Only what reads sums, which are registers, is there once
  // for each chunk. kUnrolled: for kernels that ptxas spills otherwise.
  template <int kSums>
  __device__ void Store(const Work& work, int column, float (&sums)[kSums]) {
    if (column >= work.columns) return;
    constexpr int kChunks = (2 * kSums + kChunk - 1) / kChunk;
    // Calls stage(sums, blocks of 8 rows) for a chunk.
    auto chunk_sums = [&](int chunk, auto stage) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        // The last chunk may be half full.
        if (chunk == i) stage(sums + i * (kChunk / 2), min(kChunk, 2 * kSums - i * kChunk) / 8);
      }
    };
    if constexpr (kOwn == Own::kNothing) {
      if (gemm_.epilogue.Any()) return StoreFused<kChunks>(work, column, chunk_sums);
    } else if (gemm_.epilogue.Linear() && InRegisters()) {
      // Rows of no segment are zeros.
      if (gemm_.epilogue.bias != nullptr && work.weight >= 0) AddBias(work, column, 0, sums);
    } else if (gemm_.epilogue.Any()) {
      return StoreFused<kChunks>(work, column, chunk_sums);
    }
    StorePlain<kChunks>(work, column, OutTarget(work), chunk_sums);
  }

  // The bias of the half of w that begins at `half`. A thread's sum 4 * b + i is in row
  // 8 * b + Lane() % 4 * 2 + i % 2 of the tile, and in column Column() + i / 2 * 8 of the 64.
  template <int kSums>
  __device__ void AddBias(const Work& work, int column, int half, float (&sums)[kSums]) const {
    float bias[2];
    LoadBias(work, column, half, bias);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] += bias[j / 2 % 2];
  }

  // `blocks` times 8 rows of a tile from `first` on, times their scales. Each lane loads one of 32
  // rows: by chunks, since ptxas begins all loads at once, and has no registers for them.
  template <int kRows>
  __device__ static void ScaleRows(const GemmSm90& gemm, const Work& work, int first, float* sums,
                                   int blocks) {
    if (gemm.epilogue.row_scale == nullptr || work.weight < 0) return;
#pragma unroll
    for (int begin = 0; begin < kRows / 8; begin += 4) {
      if (begin >= blocks) break;
      const int mine = first + 8 * begin + Lane();
      float scale = 0.0f;
      if (mine < work.rows) {
        scale =
            LoadFloat(gemm.epilogue.row_scale, work.out_row + mine, gemm.epilogue.row_scale_dtype);
      }
#pragma unroll
      for (int block = begin; block < begin + 4; ++block) {
        if (block >= blocks) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float its = __shfl_sync(~0u, scale, (block - begin) * 8 + Lane() % 4 * 2 + i);
          sums[4 * block + i] *= its;
          sums[4 * block + i + 2] *= its;
        }
      }
    }
  }

  // wgrad: those of a matrix without a segment.
  __device__ void StoreZeros(const Work& work, int column) const {
    const int four = column + Thread() % 16 * 4;
    if (four >= work.columns) return;
#pragma unroll 1
    for (int row = Thread() / 16; row < work.rows; row += 8) {
      const float zeros[4] = {};
      WriteFour(work.out + row * gemm_.out_line + four, work.columns - four, zeros);
    }
  }

  // `blocks` times 8 rows of 64 columns, rounded to T, to where they are stored from: pieces of 16
  // bytes are swizzled by the row.
  template <typename T>
  __device__ static void StageHalvesOf(const float* sums, char* staged, int blocks) {
    StageFours(staged, blocks,
               [&](int word) { return Pack<T>(sums[2 * word], sums[2 * word + 1]); });
  }

  // The same of sums that are rounded, two a word.
  __device__ static void StageWords(const uint32_t* words, char* staged, int blocks) {
    StageFours(staged, blocks, [&](int word) { return words[word]; });
  }

  // kRows rows of 32 floats, and of the next 32, times `scale`; pieces of 16 bytes are swizzled by
  // the row.
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

  // `gates`, and `up`, which they let through.
  template <int kSums>
  __device__ void StoreGated(const Work& work, int column, float (&gates)[kSums],
                             float (&up)[kSums]) {
    if (column >= work.columns) return;
    if constexpr (kOwn != Own::kNothing) {
      if (!kScattered || InRegisters()) return StoreGatedOwn(work, column, gates, up);
    }
    constexpr int kRows = kChunk / 2;
    constexpr int kChunks = (2 * kSums + kRows - 1) / kRows;
#pragma unroll(kUnrolled ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kRows >= work.rows) break;
      if (Thread() == 0) WaitStored<0>();
      SyncSome(barrier_, 128);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (chunk != j) continue;
        const int blocks = min(kRows, 2 * kSums - j * kRows) / 8;
        StageFloats<kRows>(gates + j * (kRows / 2), staged_, blocks);
        StageFloats<kRows>(up + j * (kRows / 2), staged_ + kRows * 64 * 4, blocks);
      }
      SyncSome(barrier_, 128);
      WriteFused<true, kRows>(work, column, chunk * kRows);
    }
  }

 private:
  // Whether a thread does all of this epilogue to its own sums. A row by list that x has not is
  // cleared when it is stored, so it must have no bias.
  __device__ bool InRegisters() const {
    return kOwn != Own::kNothing && !gemm_.epilogue.accumulate &&
           (kOwn == Own::kBiasAndScales || gemm_.epilogue.row_scale == nullptr) &&
           !(kScattered && gemm_.epilogue.bias != nullptr);
  }

  // Those of this thread's columns, of the half of w that begins at `half`.
  __device__ void LoadBias(const Work& work, int column, int half, float (&bias)[2]) const {
    const int64_t first = static_cast<int64_t>(work.weight) * gemm_.n + half + work.out_column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = min(column + Column() + 8 * i, work.columns - 1);
      bias[i] = LoadFloat(gemm_.epilogue.bias, first + at, gemm_.epilogue.bias_dtype);
    }
  }

  // As StoreGated, in registers. The preactivation's halves are stored first, if it is asked for.
  template <int kSums>
  __device__ void StoreGatedOwn(const Work& work, int column, float (&gates)[kSums],
                                float (&up)[kSums]) {
    constexpr int kChunks = (2 * kSums + kChunk - 1) / kChunk;
    const Epilogue& epilogue = gemm_.epilogue;
    if (epilogue.bias != nullptr && work.weight >= 0) {
      AddBias(work, column, 0, gates);
      AddBias(work, column, gemm_.n / 2, up);
    }
#pragma unroll 1
    for (int part = epilogue.preactivation == nullptr ? 2 : 0; part < 3; ++part) {
      const Target to = part == 2 ? OutTarget(work) : PreactivationTarget(work, part);
      StorePlain<kChunks, false>(work, column, to, [&](int chunk, auto stage) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          if (chunk != i) continue;
          const int blocks = min(kChunk, 2 * kSums - i * kChunk) / 8;
          constexpr int kWidth = kChunk / 2;
          if (part == 1) {
            stage(up + i * kWidth, blocks);
            continue;
          }
          if (part == 2) {
            GateRows<std::min(kWidth, kSums)>(gates + i * kWidth, up + i * kWidth);
            ScaleRows<kChunk>(gemm_, work, i * kChunk, gates + i * kWidth, blocks);
            if (!kScattered && epilogue.accumulate) {
              AddExistingRows<kChunk>(work, column, i * kChunk, gates + i * kWidth, blocks);
            }
          }
          stage(gates + i * kWidth, blocks);
        }
      });
    }
  }

  // By chunks, since ptxas begins all at once, and has no registers for that.
  template <int kWidth>
  __device__ void GateRows(float* gates, float* up) const {
    if (gemm_.epilogue.rounds_preactivation) {
      Round<kWidth>(gates);
      Round<kWidth>(up);
    }
    Gate<true, kWidth>(gemm_.epilogue.activation, gates, up);
  }

  // What the result holds, added to `blocks` times 8 rows of a tile from `first` on.
  template <int kRows>
  __device__ void AddExistingRows(const Work& work, int column, int first, float* sums,
                                  int blocks) const {
    const int64_t begin = work.out + column + Column();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      if (j / 4 >= blocks) break;
      const int row = first + j / 4 * 8 + Lane() % 4 * 2 + j % 2, more = j / 2 % 2 * 8;
      if (row < work.rows && column + Column() + more < work.columns) {
        sums[j] += LoadFloat(gemm_.out, begin + row * gemm_.out_line + more, gemm_.out_dtype);
      }
    }
  }

  // To the operands' dtype, which a preactivation has.
  template <int kWidth>
  __device__ void Round(float* sums) const {
    const bool bf16 = gemm_.out_dtype == DType::kBF16;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sums[j] = bf16 ? static_cast<float>(cutlass::bfloat16_t(sums[j]))
                     : static_cast<float>(cutlass::half_t(sums[j]));
    }
  }

  // A result as tiles of it are stored: where the first row of one begins, and its tensor map.
  struct Target {
    void* data;
    int64_t begin, line;  // elements
    const CUtensorMap* map;
    int matrix;  // of the map
  };

  __device__ Target OutTarget(const Work& work) const {
    return {gemm_.out, kScattered ? work.out_column : work.out, gemm_.out_line, &gemm_.out_map,
            gemm_.wgrad ? work.weight : 0};
  }

  __device__ Target PreactivationTarget(const Work& work, int half) const {
    const int64_t column = work.out_column + half * (gemm_.n / 2);
    const int64_t row = kScattered ? 0 : static_cast<int64_t>(work.out_row) * gemm_.n;
    return {gemm_.epilogue.preactivation, row + column, gemm_.n, &gemm_.preactivation_map, half};
  }

  // kScales: with rows' scales, where a thread multiplies its own sums.
  template <int kChunks, bool kScales = true, typename ChunkSums>
  __device__ void StorePlain(const Work& work, int column, const Target& to, ChunkSums chunk_sums) {
    const bool wide = gemm_.out_dtype == DType::kF32;
#pragma unroll(kUnrolled ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= work.rows) break;
      const int rows = min(kChunk, work.rows - chunk * kChunk);
      const bool boxes = !kScattered && gemm_.stores_boxes && (gemm_.wgrad || rows == kChunk);
      // Chunks take turns with two buffers, or have one.
      turn_ = wide ? 0 : turn_ ^ 1;
      char* staged = staged_ + turn_ * kChunk * (wide ? 256 : 128);
      if (Thread() == 0) WaitStored<1>();
      SyncSome(barrier_, 128);  // what was there has been read
      chunk_sums(chunk, [&](const float* sums, int blocks) {
        // Const for the other kernels' sake: without it ptxas serializes wgrad's products (C7510).
        if constexpr (kScales && kOwn == Own::kBiasAndScales) {
          ScaleRows<kChunk>(gemm_, work, chunk * kChunk, const_cast<float*>(sums), blocks);
        }
        if (wide) {
          StageFloats<kChunk>(sums, staged, blocks);
        } else {
          StageHalves(sums, staged, blocks);
        }
      });
      if (!kScattered) FenceAsyncProxy();
      SyncSome(barrier_, 128);
      if (boxes) {
        // By TMA.
        if (Thread() == 0) {
          StoreBox(to.map, staged, work.out_column + column, work.out_row + chunk * kChunk,
                   to.matrix, gemm_.store_policy);
        }
      } else if (wide) {
        WriteFloats(staged, to, column, chunk * kChunk, rows, work.columns - column);
      } else {
        WriteHalves(staged, to, column, chunk * kChunk, rows, work.columns - column);
      }
      if (Thread() == 0) CommitStores();  // one group a chunk, so that waiting can count them
    }
  }

  // The same with everything that an epilogue may do.
  template <int kChunks, typename ChunkSums>
  __device__ void StoreFused(const Work& work, int column, ChunkSums chunk_sums) {
#pragma unroll(kUnrolled ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= work.rows) break;
      if (Thread() == 0) WaitStored<0>();
      SyncSome(barrier_, 128);
      chunk_sums(chunk, [&](const float* sums, int blocks) {
        StageFloats<kChunk>(sums, staged_, blocks);
      });
      SyncSome(barrier_, 128);
      WriteFused<false, kChunk>(work, column, chunk * kChunk);
    }
  }

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
      cute::SM90_U16x8_STSM_T::copy(words(4 * i), words(4 * i + 1), words(4 * i + 2),
                                    words(4 * i + 3),
                                    *reinterpret_cast<cute::uint128_t*>(to + i * 16 * 128));
    }
  }

  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int Thread() { return threadIdx.x % 128; }
  // This thread's first column of the 64.
  __device__ static int Column() { return Thread() / 32 * 16 + Lane() / 4; }

  // Row `row` of a tile, in elements from where its first begins.
  __device__ int64_t Line(int row, int64_t line) const {
    if constexpr (kScattered) return y_rows_[row] * line;
    return row * line;
  }

  // Rows of a list that are not stored, and those whose products are zeros.
  __device__ bool Nowhere(int row) const { return kScattered && y_rows_[row] < 0; }
  __device__ bool Missing(int row) const { return kScattered && x_rows_[row] < 0; }

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
      if constexpr (kScattered) {
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

  template <bool kGated, int kRows>
  __device__ void WriteFused(const Work& work, int column, int first_row) const {
    const Epilogue& epilogue = gemm_.epilogue;
    const int four = Thread() % 16 * 4, columns = work.columns - column - four;
    if (columns <= 0) return;
    const bool real = work.weight >= 0;  // rows that no segment reaches are zeros
    float bias[4] = {}, up_bias[4] = {};
    if (real && epilogue.bias != nullptr) {
      const int64_t at =
          static_cast<int64_t>(work.weight) * gemm_.n + work.out_column + column + four;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= columns) continue;
        bias[j] = LoadFloat(epilogue.bias, at + j, epilogue.bias_dtype);
        if (kGated)
          up_bias[j] = LoadFloat(epilogue.bias, at + gemm_.n / 2 + j, epilogue.bias_dtype);
      }
    }
#pragma unroll 1
    for (int row = Thread() / 16; row < kRows && first_row + row < work.rows; row += 8) {
      if (Nowhere(first_row + row)) continue;
      float values[4], up[4];
      ReadProducts<kRows>(staged_, first_row, row, four, values);
      if (real) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] += bias[j];
        if (kGated) {
          ReadProducts<kRows>(staged_ + kRows * 64 * 4, first_row, row, four, up);
#pragma unroll
          for (int j = 0; j < 4; ++j) up[j] += up_bias[j];
          Gate<false, 4>(epilogue.activation, values, up);
        } else {
          Activate<4>(epilogue.activation, values);
        }
        if (epilogue.row_scale != nullptr) {
          const float scale = LoadFloat(epilogue.row_scale, work.out_row + first_row + row,
                                        epilogue.row_scale_dtype);
#pragma unroll
          for (int j = 0; j < 4; ++j) values[j] *= scale;
        }
      }
      const int64_t at =
          OutTarget(work).begin + Line(first_row + row, gemm_.out_line) + column + four;
      if (epilogue.accumulate) {
        AddExisting(at, columns, values);
      }
      WriteFour(at, columns, values);
    }
  }

  const GemmSm90& gemm_;
  char* const staged_;
  const int barrier_;
  const int* x_rows_ = nullptr;
  const int* y_rows_ = nullptr;
  int turn_ = 0;
};

}  // namespace jgg::device

// From float32 sums in registers to the result: bias, activation, row scale, existing result,
// rounding. One warpgroup, 64 columns at a time.
//
// Sums go through shared memory, kChunk rows at a time: see staged_sm90.cuh. Whole chunks leave by
// TMA. Others leave in pieces of 16 bytes along a row, without those outside the tile, so tails are
// exact. float32 leaves that way too, and so do rows by list. store_sm90.cuh has another way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"
#include "grouped_mm/device/staged_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg::device {

// A thread does this much of an epilogue to its own sums, as far as a kernel has registers. The
// rest goes through shared memory, row by row.
enum class Own { kNothing, kBias, kBiasAndScales };

// Shared memory for two chunks of two-byte results, or one of float32.
template <int kChunk_, bool kRowsByList = false, bool kUnrolled = false, Own kOwn = Own::kNothing>
class EpilogueSm90 : public StagedSm90<kChunk_, kRowsByList> {
  using Staged = StagedSm90<kChunk_, kRowsByList>;

 public:
  using Staged::kChunk;
  static constexpr int kBytes = kChunk * 128 * 2;

  __device__ EpilogueSm90(const GemmSm90& gemm, void* staged, int barrier)
      : Staged(gemm), staged_(static_cast<char*>(staged)), barrier_(barrier) {}

  // Store columns [column, column + 64) of a tile.
  //
  // The loop over chunks is not unrolled, so that there is little code. Unrolled, 5 to 20 % of all
  // samples waited for instructions. Only the code that reads sums, which are registers, is there
  // once for each chunk. kUnrolled: gated tiles of few rows, whose products ptxas orders otherwise
  // beside a loop.
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

  // Multiplies `blocks` times 8 rows of a tile by their scales, from row `first` on. Each lane
  // loads the scale of one of 32 rows. ptxas begins all loads of a loop at once and has no
  // registers for all, so they come by chunks.
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

  // `gates`, and `up`, which they let through.
  template <int kSums>
  __device__ void StoreGated(const Work& work, int column, float (&gates)[kSums],
                             float (&up)[kSums]) {
    if (column >= work.columns) return;
    if constexpr (kOwn != Own::kNothing) {
      if (!kRowsByList || InRegisters()) return StoreGatedOwn(work, column, gates, up);
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
        Staged::template StageFloats<kRows>(gates + j * (kRows / 2), staged_, blocks);
        Staged::template StageFloats<kRows>(up + j * (kRows / 2), staged_ + kRows * 64 * 4, blocks);
      }
      SyncSome(barrier_, 128);
      WriteFused<true, kRows>(work, column, chunk * kRows);
    }
  }

 private:
  using Staged::AddExisting;
  using Staged::Column;
  using Staged::gemm_;
  using Staged::Lane;
  using Staged::Line;
  using Staged::Nowhere;
  using Staged::StageHalves;
  using Staged::Thread;
  using Staged::WriteFloats;
  using Staged::WriteFour;
  using Staged::WriteHalves;
  using typename Staged::Target;

  // Whether a thread does all of this epilogue to its own sums. A row by list that x does not have
  // is cleared when it is stored, so there must be no bias.
  __device__ bool InRegisters() const {
    return kOwn != Own::kNothing && !gemm_.epilogue.accumulate &&
           (kOwn == Own::kBiasAndScales || gemm_.epilogue.row_scale == nullptr) &&
           !(kRowsByList && gemm_.epilogue.bias != nullptr);
  }

  // Loads the bias of this thread's columns in the half of w that begins at `half`.
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
            if (!kRowsByList && epilogue.accumulate) {
              AddExistingRows<kChunk>(work, column, i * kChunk, gates + i * kWidth, blocks);
            }
          }
          stage(gates + i * kWidth, blocks);
        }
      });
    }
  }

  // By chunks: ptxas begins all loads at once, and has no registers for all.
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

  __device__ Target OutTarget(const Work& work) const {
    return {gemm_.out, kRowsByList ? work.out_column : work.out, gemm_.out_line, &gemm_.out_map,
            gemm_.wgrad ? work.weight : 0};
  }

  __device__ Target PreactivationTarget(const Work& work, int half) const {
    const int64_t column = work.out_column + half * (gemm_.n / 2);
    const int64_t row = kRowsByList ? 0 : static_cast<int64_t>(work.out_row) * gemm_.n;
    return {gemm_.epilogue.preactivation, row + column, gemm_.n, &gemm_.mm_maps.preactivation,
            half};
  }

  // kScales: with rows' scales, where a thread multiplies its own sums.
  template <int kChunks, bool kScales = true, typename ChunkSums>
  __device__ void StorePlain(const Work& work, int column, const Target& to, ChunkSums chunk_sums) {
    const bool wide = gemm_.out_dtype == DType::kF32;
#pragma unroll(kUnrolled ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= work.rows) break;
      const int rows = min(kChunk, work.rows - chunk * kChunk);
      const bool boxes = !kRowsByList && gemm_.stores_boxes && (gemm_.wgrad || rows == kChunk);
      // Chunks take turns with two buffers, or have one.
      turn_ = wide ? 0 : turn_ ^ 1;
      char* staged = staged_ + turn_ * kChunk * (wide ? 256 : 128);
      if (Thread() == 0) WaitStored<1>();
      SyncSome(barrier_, 128);  // what was there has been read
      chunk_sums(chunk, [&](const float* sums, int blocks) {
        // This is const for other kernels. Without it ptxas serializes wgrad's products (C7510).
        if constexpr (kScales && kOwn == Own::kBiasAndScales) {
          ScaleRows<kChunk>(gemm_, work, chunk * kChunk, const_cast<float*>(sums), blocks);
        }
        if (wide) {
          Staged::template StageFloats<kChunk>(sums, staged, blocks);
        } else {
          StageHalves(sums, staged, blocks);
        }
      });
      if (!kRowsByList) FenceAsyncProxy();
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
        Staged::template StageFloats<kChunk>(sums, staged_, blocks);
      });
      SyncSome(barrier_, 128);
      WriteFused<false, kChunk>(work, column, chunk * kChunk);
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
      Staged::template ReadProducts<kRows>(staged_, first_row, row, four, values);
      if (real) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] += bias[j];
        if (kGated) {
          Staged::template ReadProducts<kRows>(staged_ + kRows * 64 * 4, first_row, row, four, up);
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

  char* const staged_;
  const int barrier_;
  int turn_ = 0;
};

}  // namespace jgg::device

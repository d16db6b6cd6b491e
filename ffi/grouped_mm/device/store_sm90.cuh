// A warp of its own stores results that are only rounded. Each warpgroup that multiplies has one or
// several buffers in shared memory, each for a chunk of rows. It fills them in turns. The store
// warp stores them by TMA, or adds them to what is there (wgrad, float32). So a warpgroup waits for
// one store only, of the chunk that had its buffer before. Its warps do not wait for each other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"
#include "grouped_mm/device/staged_sm90.cuh"

namespace jgg::device {

// The barriers of the buffers, for each of the two warpgroups.
template <int kBuffers>
struct StoreBarriers {
  uint64_t full[2][kBuffers], empty[2][kBuffers];

  // One thread. `warps` store.
  __device__ void Init(int warps) {
    for (int i = 0; i < 2 * kBuffers; ++i) {
      device::Init(&full[i / kBuffers][i % kBuffers], kMultiplyWarps / 2);
      device::Init(&empty[i / kBuffers][i % kBuffers], warps);
    }
  }
};

// Where a warpgroup's chunk of sums begins in its tile. Chunks go down a block of columns, then on
// to the next block.
struct ChunkPlace {
  int row, column;

  __device__ bool In(const Work& work) const { return row < work.rows && column < work.columns; }
};

template <typename Config>
__device__ ChunkPlace PlaceOfChunk(int chunk, int group) {
  constexpr int kEach = Config::kRows / Config::kStoreChunk;
  const int block = chunk / kEach;
  return {chunk % kEach * Config::kStoreChunk,
          Config::kGates ? 64 * block : 128 * block + 64 * group};
}

// How many rows' sums the first of a tile's halves has: see Products::MultiplyTile.
template <typename Config>
__device__ int HalfRows(int rows) {
  return Config::kHalves == 1 || rows <= 128 ? rows : (rows + 15) / 16 * 8;
}

template <typename Config>
__device__ char* Buffer(typename Config::SharedMemory& memory, int group, int index) {
  constexpr int kBytes = sizeof(memory.staged[0]) / Config::kStoreBuffers;
  return memory.staged[group] + index * kBytes;
}

// As EpilogueSm90::StageHalvesOf, but lines are columns of the tile, 64 for each 64 rows.
template <int kChunk, typename Words>
__device__ void StageColumns(char* staged, int blocks, Words words) {
  // Lane l names a line of matrix l / 8 of the warp's 16 columns x 16 rows.
  const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    if (2 * i >= blocks) break;
    const int piece = 2 * i % 8 + lane / 16;
    char* to = staged + i / 4 * (64 * 128) + line * 128 + (piece ^ (line % 8)) * 16;
    StoreMatrices<false>(to, words(4 * i), words(4 * i + 1), words(4 * i + 2), words(4 * i + 3));
  }
}

// Stages a chunk of a warpgroup's sums, by rows or, if kTransposed, by columns: see
// EpilogueSm90::StageHalvesOf.
template <typename Config, typename T, typename Epilogue>
__device__ void StageRounded(const float* sums, char* staged, int blocks) {
  if constexpr (Config::kTransposed) {
    StageColumns<Epilogue::kChunk>(
        staged, blocks, [&](int word) { return Pack<T>(sums[2 * word], sums[2 * word + 1]); });
  } else {
    Epilogue::template StageHalvesOf<T>(sums, staged, blocks);
  }
}

// kTransposed: stores zeros for a matrix without a segment, to 64 columns from `column` on.
__device__ inline void StoreZeroLines(const GemmSm90& gemm, const Work& work, int column) {
  const int thread = threadIdx.x % 128;
#pragma unroll 1
  for (int line = column + thread / 32; line < min(column + 64, work.columns); line += 4) {
    const int64_t from =
        work.weight * gemm.out_group + (work.out_column + line) * gemm.out_line + work.out_row;
    for (int row = thread % 32 * 8; row < work.rows; row += 32 * 8) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(gemm.out) + from + row) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// One warp stores rows [first, first + rows) of a tile from a buffer, 64 columns from `column` on.
// float32 takes two calls, for 32 columns each. TMA may still be copying when this returns.
template <typename Config>
__device__ void StoreChunk(const GemmSm90& gemm, const Work& work, const char* staged, int column,
                           int first, int rows) {
  constexpr int kPiece = Config::kWide ? 4 : 8;  // elements of 16 bytes
  constexpr int kBox = Config::Epilogue::kChunk;
  static_assert(Config::kStoreChunk == kBox || Config::kStoreChunk == 2 * kBox);
  const int lane = threadIdx.x % 32, out_column = work.out_column + column;
  const int matrix = gemm.wgrad ? work.weight : 0;
  if constexpr (Config::kTransposed) {
    if (lane != 0) return;
#pragma unroll
    for (int row = 0; row < Config::kStoreChunk; row += 64) {
      if (row < rows) {
        StoreBox(&gemm.out_map, staged + row * 128, work.out_row + first + row, out_column, matrix,
                 gemm.store_policy);
      }
    }
    return;
  }
  auto store = [&](int row) {
    if (Config::kWide && gemm.epilogue.accumulate) {
      AddBox(&gemm.out_map, staged + row * 128, out_column, work.out_row + first + row, matrix);
    } else {
      StoreBox(&gemm.out_map, staged + row * 128, out_column, work.out_row + first + row, matrix,
               gemm.store_policy);
    }
  };
  // wgrad: tiles end with a box, or where the matrix ends. TMA knows where that is.
  if (gemm.wgrad || rows == Config::kStoreChunk) {
    if (lane != 0) return;
#pragma unroll
    for (int row = 0; row < Config::kStoreChunk; row += kBox) {
      if (row < rows) store(row);
    }
    return;
  }
  // The last rows of a tile of mm leave 8 at a time, then one by one. Rows behind them belong to
  // others.
  const int whole = rows / 8 * 8;
  if (lane == 0) {
    int row = 0;
    if (Config::kStoreChunk > kBox && rows >= kBox) {
      store(0);
      row = kBox;
    }
    for (; row < whole; row += 8) {
      StoreBox(&gemm.mm_maps.out_rest, staged + row * 128, out_column, work.out_row + first + row,
               0, gemm.store_policy);
    }
  }
  const int piece = lane % 8;
  if (column + piece * kPiece >= work.columns) return;
  for (int row = whole + lane / 8; row < rows; row += 4) {
    const int64_t to = work.out + (first + row) * gemm.out_line + column + piece * kPiece;
    *reinterpret_cast<uint4*>(static_cast<char*>(gemm.out) + to * (16 / kPiece)) =
        *reinterpret_cast<const uint4*>(staged + row * 128 + (piece ^ (row % 8)) * 16);
  }
}

// The warp that stores tiles of several blocks of columns. Of each block, each warpgroup has a
// chunk.
template <typename Config>
__device__ void StoreBlocksWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  static_assert(Config::kStoreBuffers == 1);
  Place<1> places[2];
  ForEachWork<Config>(memory, [&](const Work& work) {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const ChunkPlace place = PlaceOfChunk<Config>(block, group);
        if (!place.In(work)) continue;
        Wait(&memory.stores.full[group][0], places[group].parity);
        StoreChunk<Config>(gemm, work, memory.staged[group], place.column, 0, work.rows);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          CommitStores();
          WaitStored<0>();
          Arrive(&memory.stores.empty[group][0]);
        }
        __syncwarp();
        places[group].Next();
      }
    }
  });
}

// The warp that stores.
template <typename Config>
__device__ void StoreWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  constexpr int kChunk = Config::kStoreChunk;
  Place<Config::kStoreBuffers> places[2];
  ForEachWork<Config>(memory, [&](const Work& work) {
    if (Config::kNeedsSlices && work.slices == 0) return;
    uint64_t* before = nullptr;  // of the buffer that is being stored
    const int half_rows = HalfRows<Config>(work.rows);
#pragma unroll 1
    for (int first = 0; first < work.rows;) {
      const int end = min(first < half_rows ? half_rows : work.rows, work.rows);
      const int rows = min(kChunk, end - first);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        if (64 * group >= work.columns) continue;
        Place<Config::kStoreBuffers>& at = places[group];
        uint64_t* empty = &memory.stores.empty[group][at.index];
        // This is the only buffer, and no other warpgroup stores. Nobody fills it before it is
        // free.
        if (before == empty) {
          if (threadIdx.x % 32 == 0) {
            WaitStored<0>();
            Arrive(before);
          }
          before = nullptr;
        }
        Wait(&memory.stores.full[group][at.index], at.parity);
        const char* staged = Buffer<Config>(memory, group, at.index);
#pragma unroll
        for (int i = 0; i < (Config::kWide ? 2 : 1); ++i) {
          const int column = 64 * group + 32 * i;
          if (column >= work.columns) continue;
          StoreChunk<Config>(gemm, work, staged + i * kChunk * 128, column, first, rows);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          CommitStores();
          WaitStored<1>();
          if (before != nullptr) Arrive(before);
        }
        before = empty;
        at.Next();
      }
      first += rows;
    }
    if (threadIdx.x % 32 == 0) {
      WaitStored<0>();
      if (before != nullptr) Arrive(before);
    }
    __syncwarp();
  });
}

// A warpgroup hands a chunk of its tile to the store warp. stage(buffer) writes it.
template <typename Config, typename Function>
__device__ void StageChunk(typename Config::SharedMemory& memory, int group,
                           Place<Config::kStoreBuffers>& at, Function stage) {
  Wait(&memory.stores.empty[group][at.index], at.parity ^ 1);
  stage(Buffer<Config>(memory, group, at.index));
  FenceAsyncProxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(&memory.stores.full[group][at.index]);
  at.Next();
}

// The last chunks of a warpgroup's tile. A buffer for them is free only when an earlier chunk has
// been stored. So the warpgroup keeps them in registers, rounded if to two bytes, until it
// multiplies the next tile.
template <typename Config>
class LateChunks {
 public:
  // Keeps one more chunk, behind i others. Multiplies float32 sums by `scale`, which also takes
  // them out of the registers that tensor cores add to.
  template <typename T>
  __device__ void Keep(int i, const float* sums, float scale) {
    kept_ = i + 1;
#pragma unroll
    for (int j = 0; j < kChunkWords; ++j) {
      if constexpr (Config::kWide) {
        words_[i][j] = __float_as_uint(sums[j] * scale);
      } else {
        words_[i][j] = Pack<T>(sums[2 * j], sums[2 * j + 1]);
      }
    }
  }

  // Stages the first chunk, if there is one and a buffer is free.
  __device__ void TryStageFirst(typename Config::SharedMemory& memory, int group,
                                Place<Config::kStoreBuffers>& at) {
    if (kept_ > 0 && Over(&memory.stores.empty[group][at.index], at.parity ^ 1)) {
      StageFirst(memory, group, at);
    }
  }

  __device__ void StageAll(typename Config::SharedMemory& memory, int group,
                           Place<Config::kStoreBuffers>& at) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kept_ > 0) StageFirst(memory, group, at);
    }
  }

 private:
  static constexpr int kCount = Config::kLateChunks, kChunk = Config::kStoreChunk;
  static constexpr int kChunkWords = kChunk / (Config::kWide ? 2 : 4);

  __device__ void StageFirst(typename Config::SharedMemory& memory, int group,
                             Place<Config::kStoreBuffers>& at) {
    StageChunk<Config>(memory, group, at, [&](char* staged) {
      if constexpr (Config::kWide) {
        float values[kChunkWords];
#pragma unroll
        for (int j = 0; j < kChunkWords; ++j) values[j] = __uint_as_float(words_[0][j]);
        StagedSm90<kChunk>::template StageFloats<kChunk>(values, staged, kChunk / 8);
      } else {
        if constexpr (Config::kTransposed) {
          StageColumns<kChunk>(staged, kChunk / 8, [&](int word) { return words_[0][word]; });
        } else {
          StagedSm90<kChunk>::StageWords(words_[0], staged, kChunk / 8);
        }
      }
    });
    --kept_;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kChunkWords; ++j) words_[i - 1][j] = words_[i][j];
    }
  }

  uint32_t words_[kCount][kChunkWords];
  int kept_ = 0;
};

struct NoLateChunks {
  template <typename Memory, typename Place>
  __device__ void TryStageFirst(Memory&, int, Place&) {}
  template <typename Memory, typename Place>
  __device__ void StageAll(Memory&, int, Place&) {}
};

// A warpgroup hands its sums of a tile to the store warp, except for late chunks, which `late`
// keeps. Multiplies float32 sums by `scale`.
template <typename Config, typename T, int kSums, typename Late>
__device__ void StageTile(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                          const Work& work, int group, Place<Config::kStoreBuffers>& at,
                          float (&sums)[Config::kBlocks * Config::kHalves][kSums], Late& late,
                          float scale = 1.0f) {
  constexpr int kChunk = Config::kStoreChunk, kChunks = (2 * kSums + kChunk - 1) / kChunk;
  constexpr int kEarly = kChunks - Config::kLateChunks;
  if constexpr (Config::kBlocks == 2) {
    static_assert(kChunks == 1 && Config::kLateChunks == 1);
    if (!PlaceOfChunk<Config>(0, group).In(work)) return;
    StageChunk<Config>(memory, group, at, [&](char* staged) {
      StageRounded<Config, T, StagedSm90<kChunk>>(sums[0], staged, kChunk / 8);
    });
    if (PlaceOfChunk<Config>(1, group).In(work)) late.template Keep<T>(0, sums[1], scale);
    return;
  }
  const int half_rows = HalfRows<Config>(work.rows);
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) {
    const int rows = half == 0 ? half_rows : work.rows - half_rows;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= rows) break;
      const float* from = sums[half] + chunk * (kChunk / 2);
      if constexpr (Config::kLateChunks > 0) {
        if (chunk >= kEarly) {
          late.template Keep<T>(chunk - kEarly, from, scale);
          continue;
        }
      }
      StageChunk<Config>(memory, group, at, [&](char* staged) {
        // The last chunk may be half full.
        const int blocks = std::min(kChunk, 2 * kSums - chunk * kChunk) / 8;
        if constexpr (Config::kWide) {
          StagedSm90<kChunk>::template StageFloats<kChunk>(from, staged, blocks, scale);
        } else {
          StageRounded<Config, T, StagedSm90<kChunk>>(from, staged, blocks);
        }
      });
    }
  }
}

}  // namespace jgg::device

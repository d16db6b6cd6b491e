// Results that are only rounded to two bytes leave through a warp of their own. Each warpgroup that
// multiplies has two buffers in shared memory, for a chunk of rows each: it fills them in turns,
// and that warp stores them by TMA. So a warpgroup waits for no store but that of the chunk before
// the last, and its warps do not wait for each other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"

namespace jgg::device {

constexpr int kStoreBuffers = 2;

// The barriers of the buffers, for each of the two warpgroups.
struct StoreBarriers {
  uint64_t full[2][kStoreBuffers], empty[2][kStoreBuffers];

  // One thread.
  __device__ void Init() {
    for (int i = 0; i < 2 * kStoreBuffers; ++i) {
      device::Init(&full[i / kStoreBuffers][i % kStoreBuffers], kMultiplyWarps / 2);
      device::Init(&empty[i / kStoreBuffers][i % kStoreBuffers], 1);
    }
  }
};

// Rows of a tile whose sums are in the first of its halves; see Products::Tile.
template <typename Config>
__device__ int HalfRows(int rows) {
  return Config::kHalves == 1 || rows <= 128 ? rows : (rows + 15) / 16 * 8;
}

// Rows [first, first + rows) of a tile, 64 columns from `column` on, from a buffer. One warp; what
// TMA copies is under way afterwards.
template <typename Config>
__device__ void StoreChunk(const GemmSm90& gemm, const Work& work, const char* staged, int column,
                           int first, int rows) {
  const int lane = threadIdx.x % 32, out_column = work.out_column + column;
  if (gemm.wgrad || rows == Config::Epilogue::kChunk) {  // wgrad: TMA knows where a matrix ends
    if (lane == 0) {
      StoreBox(&gemm.out_map, staged, out_column, work.out_row + first,
               gemm.wgrad ? work.weight : 0);
    }
    return;
  }
  // The last rows of a tile of mm, behind which are those of others: 8 at a time, then one by one.
  const int whole = rows / 8 * 8;
  if (lane == 0) {
    for (int row = 0; row < whole; row += 8) {
      StoreBox(&gemm.out_rest, staged + row * 128, out_column, work.out_row + first + row, 0);
    }
  }
  const int piece = lane % 8;
  if (column + piece * 8 >= work.columns) return;
  for (int row = whole + lane / 8; row < rows; row += 4) {
    const int64_t to = work.out + (first + row) * gemm.out_line + column + piece * 8;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(gemm.out) + to) =
        *reinterpret_cast<const uint4*>(staged + row * 128 + (piece ^ (row % 8)) * 16);
  }
}

// The warp that stores.
template <typename Config>
__device__ void StoreWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  constexpr int kChunk = Config::Epilogue::kChunk;
  Place<kStoreBuffers> places[2];
  ForEachWork<Config>(memory, [&](const Work& work) {
    uint64_t* before = nullptr;  // of the buffer that is being stored
    const int half_rows = HalfRows<Config>(work.rows);
#pragma unroll 1
    for (int first = 0; first < work.rows;) {
      const int end = min(first < half_rows ? half_rows : work.rows, work.rows);
      const int rows = min(kChunk, end - first);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        if (64 * group >= work.columns) continue;
        Place<kStoreBuffers>& at = places[group];
        Wait(&memory.stores.full[group][at.index], at.parity);
        const char* staged = memory.staged[group] + at.index * kChunk * 128;
        StoreChunk<Config>(gemm, work, staged, 64 * group, first, rows);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          CommitStores();
          WaitStored<1>();
          if (before != nullptr) Arrive(before);
        }
        before = &memory.stores.empty[group][at.index];
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

// A chunk of a warpgroup's tile, to that warp: stage(buffer).
template <typename Config, typename Function>
__device__ void StageChunk(typename Config::SharedMemory& memory, int group,
                           Place<kStoreBuffers>& at, Function stage) {
  Wait(&memory.stores.empty[group][at.index], at.parity ^ 1);
  stage(memory.staged[group] + at.index * Config::Epilogue::kChunk * 128);
  FenceAsyncProxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(&memory.stores.full[group][at.index]);
  at.Next();
}

// The last chunks of a warpgroup's tile: a buffer for them is free only when an earlier chunk has
// been stored. So they are rounded, and the warpgroup keeps them until it multiplies the next tile.
template <typename Config>
class LateChunks {
 public:
  // Keep one behind those that are kept, of which there are i.
  template <typename T>
  __device__ void Keep(int i, const float* sums) {
    kept_ = i + 1;
#pragma unroll
    for (int j = 0; j < kChunkWords; ++j) words_[i][j] = Pack<T>(sums[2 * j], sums[2 * j + 1]);
  }

  // Stage the first, if there is one and a buffer is free.
  __device__ void TryStageFirst(typename Config::SharedMemory& memory, int group,
                                Place<kStoreBuffers>& at) {
    if (kept_ > 0 && Over(&memory.stores.empty[group][at.index], at.parity ^ 1)) {
      StageFirst(memory, group, at);
    }
  }

  __device__ void StageAll(typename Config::SharedMemory& memory, int group,
                           Place<kStoreBuffers>& at) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kept_ > 0) StageFirst(memory, group, at);
    }
  }

 private:
  static constexpr int kCount = Config::kLateChunks, kChunkWords = Config::Epilogue::kChunk / 4;

  __device__ void StageFirst(typename Config::SharedMemory& memory, int group,
                             Place<kStoreBuffers>& at) {
    StageChunk<Config>(memory, group, at, [&](char* staged) {
      Config::Epilogue::StageWords(words_[0], staged, kChunkWords / 2);
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
  template <typename Memory>
  __device__ void TryStageFirst(Memory&, int, Place<kStoreBuffers>&) {}
  template <typename Memory>
  __device__ void StageAll(Memory&, int, Place<kStoreBuffers>&) {}
};

// A warpgroup's sums of a tile, to that warp, but for those that come late: not in wgrad of a
// K-major L, which was no faster with them, and slower where segments are short.
template <typename Config, typename T, int kSums, typename Late>
__device__ void StageTile(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                          const Work& work, int group, Place<kStoreBuffers>& at,
                          float (&sums)[Config::kHalves][kSums], Late& late) {
  using Epilogue = typename Config::Epilogue;
  constexpr int kChunk = Epilogue::kChunk, kChunks = (2 * kSums + kChunk - 1) / kChunk;
  constexpr int kEarly = kChunks - Config::kLateChunks;
  const int half_rows = HalfRows<Config>(work.rows);
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) {
    const int rows = half == 0 ? half_rows : work.rows - half_rows;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= rows) break;
      const float* from = sums[half] + chunk * (kChunk / 2);
      if constexpr (Config::kLateChunks > 0) {
        if (chunk >= kEarly && !(Config::kLKMajor && gemm.wgrad)) {
          late.template Keep<T>(chunk - kEarly, from);
          continue;
        }
      }
      StageChunk<Config>(memory, group, at, [&](char* staged) {
        // The last chunk may be half full.
        Epilogue::template StageHalvesOf<T>(from, staged,
                                            std::min(kChunk, 2 * kSums - chunk * kChunk) / 8);
      });
    }
  }
}

}  // namespace jgg::device

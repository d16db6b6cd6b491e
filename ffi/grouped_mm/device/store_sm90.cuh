// Results that are only rounded to two bytes leave through a warp of their own. Each warpgroup that
// multiplies has two buffers in shared memory, for a chunk of rows each: it fills them in turns,
// and that warp stores them by TMA. So a warpgroup waits for no store but that of the chunk before
// the last, and its warps do not wait for each other.
#pragma once

#include <algorithm>
#include <cstdint>

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

// A warpgroup's sums of a tile, to that warp.
template <typename Config, typename T, int kSums>
__device__ void StageTile(typename Config::SharedMemory& memory, const Work& work, int group,
                          Place<kStoreBuffers>& at, float (&sums)[Config::kHalves][kSums]) {
  using Epilogue = typename Config::Epilogue;
  constexpr int kChunk = Epilogue::kChunk, kChunks = (2 * kSums + kChunk - 1) / kChunk;
  const int half_rows = HalfRows<Config>(work.rows);
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) {
    const int rows = half == 0 ? half_rows : work.rows - half_rows;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kChunk >= rows) break;
      Wait(&memory.stores.empty[group][at.index], at.parity ^ 1);
      // The last chunk may be half full.
      Epilogue::template StageHalvesOf<T>(sums[half] + chunk * (kChunk / 2),
                                          memory.staged[group] + at.index * kChunk * 128,
                                          std::min(kChunk, 2 * kSums - chunk * kChunk) / 8);
      FenceAsyncProxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(&memory.stores.full[group][at.index]);
      at.Next();
    }
  }
}

}  // namespace jgg::device

// Plain two-byte results: each of the two warpgroups has tiles of its own, 192 rows x 128 columns,
// and they multiply in turns. So one rounds and stages its sums while the other keeps the
// tensor cores busy. As gemm_sm90.cuh in all else; buffers for results are a ring that both share.
#pragma once

#include <cstdint>
#include <utility>

#include "grouped_mm/device/gemm_sm90.cuh"

namespace jgg::device {

// One for each product, since registers are few.
template <typename Element_, bool kLKMajor_, bool kRKMajor_, bool kWgrad_>
struct PingPongSm90Config {
  using Element = Element_;
  static constexpr bool kLKMajor = kLKMajor_, kRKMajor = kRKMajor_;
  static constexpr int kRows = 192, kBlocks = 1, kHalves = 1, kPlanes = 1;
  static constexpr int kStages = 4, kCluster = 2, kThreads = 384, kWorks = 4;
  static constexpr int kBuffers = 8;  // chunks of results; a tile has up to 6
  static constexpr bool kWgrad = kWgrad_, kRaggedK = kWgrad, kRaggedRows = !kWgrad;
  static constexpr bool kGathered = false, kStoreWarp = true;
  static constexpr int kFeedRegisters = 56, kMultiplyRegisters = 224;
  static constexpr int kChunkL = 64, kChunkBytesL = 64 * 128, kChunkBytesR = 64 * 128;
  static constexpr int kChunksL = kRows / kChunkL, kChunksR = 2;
  using Epilogue = EpilogueSm90<kChunkL>;

  struct SharedMemory {
    alignas(1024) char l[kStages][kPlanes][kChunksL * kChunkBytesL];
    alignas(1024) char r[kStages][kPlanes][kChunksR * kChunkBytesR];
    alignas(1024) char staged[kBuffers][kChunkL * 128];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages], cleared[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
    uint64_t stored_full[kBuffers], stored_empty[kBuffers];
    uint64_t turn[2];  // a warpgroup's, to multiply
  };
};

// Chunks of results that a tile has: 64 rows x 64 columns, column by column.
__device__ inline int ResultChunks(const Work& work) {
  return (work.rows + 63) / 64 * (work.columns > 64 ? 2 : work.columns > 0);
}

template <typename Config>
struct PingPongProducts {
  using Memory = typename Config::SharedMemory;
  using Stage = Place<Config::kStages>;
  using Sums = float[2][Config::kRows / 2];  // of 64 columns, and of the next 64

  // All k of a tile. Lets the other warpgroup multiply when the last products are under way, and
  // leaves both rings behind the tile.
  __device__ static void Tile(Memory& memory, const Work& work, int group, Stage& at,
                              Stage& cleared, Sums& sums) {
    const int slices = work.slices, rows = work.rows;
    if (slices == 0) {
      PassTurn(memory, group);
    } else if constexpr (!Config::kLKMajor) {  // by whole chunks of 64 rows
      if (rows > 128) return Loop<192>(memory, slices, work, group, at, cleared, sums);
      if (rows > 64) return Loop<128>(memory, slices, work, group, at, cleared, sums);
      Loop<64>(memory, slices, work, group, at, cleared, sums);
    } else {
      if (rows > 176) return Loop<192>(memory, slices, work, group, at, cleared, sums);
      if (rows > 160) return Loop<176>(memory, slices, work, group, at, cleared, sums);
      if (rows > 144) return Loop<160>(memory, slices, work, group, at, cleared, sums);
      if (rows > 128) return Loop<144>(memory, slices, work, group, at, cleared, sums);
      if (rows > 96) return Loop<128>(memory, slices, work, group, at, cleared, sums);
      if (rows > 64) return Loop<96>(memory, slices, work, group, at, cleared, sums);
      Loop<64>(memory, slices, work, group, at, cleared, sums);
    }
  }

 private:
  // All warps of the other warpgroup wait for all of these.
  __device__ static void PassTurn(Memory& memory, int group) {
    if (threadIdx.x % 32 == 0) Arrive(&memory.turn[group ^ 1]);
  }

  template <int kN>
  __device__ static void Loop(Memory& memory, int slices, const Work& work, int group, Stage& at,
                              Stage& cleared, Sums& sums) {
    using cute::SM90::GMMA::Major;
    using Instruction =
        WarpgroupProduct<typename Config::Element, kN, Config::kRKMajor ? Major::K : Major::MN,
                         Config::kLKMajor ? Major::K : Major::MN>;
    // Bytes from one 16 k to the next.
    constexpr int kStepL = Config::kLKMajor ? 32 : 16 * 128;
    constexpr int kStepR = Config::kRKMajor ? 32 : 16 * 128;
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t r_first = TileDescriptor(SharedAddress(memory.r), 64 * 128);
    slices = Uniform(slices);
    const int last = Uniform(work.last);
    const bool cut_last = Config::kWgrad && last < kSliceSm90;
    const bool cut_first = Config::kWgrad && Uniform(work.first) > 0;
    Stage here{Uniform(at.index), Uniform(at.parity)};
    // Of the last slice, which comes first, only the k that there are.
    const bool tail = last <= kSliceSm90 - 16;
    uint32_t l_tile, r_tile;
    auto begin = [&](int turn) {
      Wait(&memory.full[here.index], here.parity);
      if (turn == 0 ? cut_last || (cut_first && slices == 1) : cut_first && turn == 1) {
        Wait(&memory.cleared[cleared.index], cleared.parity);
        cleared.Next();
      }
      l_tile = Uniform(l_first + here.index * (sizeof(memory.l[0]) >> 4));
      r_tile = Uniform(r_first + here.index * (sizeof(memory.r[0]) >> 4));
    };
    auto multiply = [&](int step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Multiply<Instruction>(r_tile + ((step * kStepR + i * 64 * 128) >> 4),
                              l_tile + (step * kStepL >> 4), sums[i], true,
                              std::make_index_sequence<kN / 2>{});
      }
    };
    auto release_before = [&] {  // the stage before this one
      Release<Config>(memory, (here.index == 0 ? Config::kStages : here.index) - 1);
    };
    if (tail) {
      begin(0);
#pragma unroll 1
      for (int step = 0; step * 16 < last; ++step) {
        WarpgroupArrive();
        multiply(step);
        WarpgroupCommit();
      }
      WarpgroupWait<0>();
      here.Next();
    }
    // A slice is released when the next one is under way: nobody else's products would fill a gap.
#pragma unroll 1
    for (int turn = tail; turn < slices; ++turn) {
      begin(turn);
      WarpgroupArrive();
#pragma unroll
      for (int step = 0; step < kSliceSm90 / 16; ++step) multiply(step);
      WarpgroupCommit();
      WarpgroupWait<1>();
      if (turn > 0) release_before();
      here.Next();
    }
    PassTurn(memory, group);
    WarpgroupWait<0>();
    release_before();
    at = here;
  }
};

// A warpgroup's sums to the warp that stores.
template <typename Config, typename T>
__device__ void StageResults(typename Config::SharedMemory& memory, const Work& work,
                             Place<Config::kBuffers>& at,
                             typename PingPongProducts<Config>::Sums& sums) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    if (64 * block >= work.columns) break;
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunksL; ++chunk) {
      if (chunk * 64 >= work.rows) break;
      Wait(&memory.stored_empty[at.index], at.parity ^ 1);
      Config::Epilogue::template StageHalvesOf<T>(sums[block] + chunk * 32, memory.staged[at.index],
                                                  8);
      FenceAsyncProxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(&memory.stored_full[at.index]);
      at.Next();
    }
  }
}

// One of the two warpgroups, which take every other tile. Tiles stay in their ring, for registers
// are few.
template <typename Config>
__device__ void PingPongWarpgroup(typename Config::SharedMemory& memory, int group) {
  using Products = PingPongProducts<Config>;
  Place<Config::kStages> at, cleared;
  Place<Config::kBuffers> buffer;
  for (int tile = 0;; ++tile) {
    const int place = tile % Config::kWorks;
    Wait(&memory.work_full[place], tile / Config::kWorks % 2);
    const Work& work = memory.works[place];
    if (work.rows == 0) return;
    if (tile % 2 == group) {
      typename Products::Sums sums;
#pragma unroll
      for (int i = 0; i < Config::kRows / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
      // Also until the other has waited for all stages before this tile's: behind two phases of a
      // barrier parities would mean nothing. The first turn is the first warpgroup's.
      Wait(&memory.turn[group], tile / 2 % 2 ^ group ^ 1);
      Products::Tile(memory, work, group, at, cleared, sums);
      StageResults<Config, typename Config::Element>(memory, work, buffer, sums);
    } else {
      at.Skip(work.slices);
      if (Config::kWgrad) cleared.Skip(work.Cuts());
      buffer.Skip(ResultChunks(work));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(&memory.work_empty[place]);
  }
}

// The warp that stores what both warpgroups stage.
template <typename Config>
__device__ void PingPongStoreWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  Place<Config::kBuffers> at, stored;
  ForEachWork<Config>(memory, [&](const Work& work) {
    int under_way = 0;
    auto release = [&] {  // one lane's
      if (threadIdx.x % 32 == 0) Arrive(&memory.stored_empty[stored.index]);
      stored.Next();
      --under_way;
    };
#pragma unroll 1
    for (int column = 0; column < min(work.columns, 128); column += 64) {
#pragma unroll 1
      for (int row = 0; row < work.rows; row += 64) {
        Wait(&memory.stored_full[at.index], at.parity);
        StoreChunk<Config>(gemm, work, memory.staged[at.index], column, row,
                           min(64, work.rows - row));
        __syncwarp();
        CommitStores();
        at.Next();
        if (++under_way > 2) {
          WaitStored<2>();
          release();
        }
      }
    }
    WaitStored<0>();
    while (under_way > 0) release();
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    PingPongSm90Kernel(const __grid_constant__ GemmSm90 gemm) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const int block = BlockInCluster();
  if (threadIdx.x == 0) {
    for (uint64_t& cleared : memory.cleared) Init(&cleared, 32);
    for (uint64_t& turn : memory.turn) Init(&turn, kMultiplyWarps / 2);
    for (int i = 0; i < Config::kBuffers; ++i) {
      Init(&memory.stored_full[i], kMultiplyWarps / 2);
      Init(&memory.stored_empty[i], 1);
    }
    InitRings<Config>(memory, 1, 2 + Config::kWgrad, 1, kMultiplyWarps / 2);
    Prefetch(&gemm.l_map);
    Prefetch(&gemm.r_map);
    Prefetch(&gemm.out_map);
  }
  SyncRings<Config>();
  if (threadIdx.x < 128) {
    GiveRegisters<Config::kFeedRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) CopyThread<Config>(gemm, memory, block);
      __syncwarp();
    } else if (warp == 3) {
      PingPongStoreWarp<Config>(gemm, memory);
    } else if constexpr (Config::kWgrad) {
      ClearWarp<Config>(memory);
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    PingPongWarpgroup<Config>(memory, static_cast<int>(threadIdx.x) / 128 - 1);
  }
  ClusterSync();  // see GemmSm90Kernel
}

}  // namespace jgg::device

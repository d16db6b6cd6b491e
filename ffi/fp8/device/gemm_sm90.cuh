// The kernel of products of two FP8 operands. As grouped_mm's (grouped_mm/device/gemm_sm90.cuh), of
// tiles of 128 rows and 256 columns, one above the other in a pair of blocks, which share R:
//   warp 0  schedules
//   warp 1  copies slices of L and R
//   warp 2  puts a stage's scales beside it; a fast kernel has none
//   warp 3  stores
#pragma once

#include <cstdint>
#include <type_traits>

#include "fp8/device/products_sm90.cuh"
#include "fp8/gemm_sm90.h"
#include "grouped_mm/device/gemm_sm90.cuh"

namespace jgg::device {

// The policies (grouped_mm/device/policies_sm90.cuh). All kernels have this loader. A result leaves
// while the next tile is multiplied, and takes the room of a fourth stage.
struct Fp8LoaderSm90 : LoaderSm90 {
  static constexpr int kStages = 3, kCluster = 2;
  static constexpr bool kStacked = true;
};

// Products of mm, of mm with rows first (products_sm90.cuh), and of wgrad.
struct Fp8MmSm90 : ProductsSm90 {
  static constexpr bool kLKMajor = true, kRKMajor = true;
  static constexpr int kRows = 128, kBlocks = 2;
  static constexpr bool kFast = false, kLE5M2 = false, kRE5M2 = false;
};
struct Fp8RowsFirstSm90 : Fp8MmSm90 {
  static constexpr bool kRowsFirst = true;
};
struct Fp8WgradSm90 : Fp8MmSm90 {
  static constexpr bool kRaggedK = true;
};

// The fast kernel of each, by what is e5m2.
template <typename Products, bool kL, bool kR = false>
struct Fp8FastSm90 : Products {
  static_assert(!Products::kRowsFirst && (!kR || Products::kRaggedK));
  static constexpr bool kFast = true, kLE5M2 = kL, kRE5M2 = kR;
};

// Element: of the result.
template <typename Element_>
struct Fp8StoreSm90 : StoreSm90 {
  using Element = Element_;
  static constexpr bool kStoreWarp = true, kWide = std::is_same_v<Element, float>;
};

template <typename Products, typename Store>
struct Fp8GemmSm90Config : Fp8LoaderSm90, Products, Store {
  using Products::kRows, Products::kBlocks, Products::kPlanes, Products::kRaggedK,
      Products::kRowsFirst, Products::kFast;
  using Store::kWide;
  static_assert(!kRowsFirst || (!kRaggedK && !kWide));
  static constexpr int kScheduledBlocks = kBlocks;
  static constexpr int kThreads = 384, kWorks = 4, kHalves = 1;
  // Promotion has a second set of sums. Without it there are registers for the tile before, if it
  // is rounded to two bytes, or else for those that feed.
  static constexpr bool kLate = kFast && !kWide;
  static constexpr int kFeedRegisters = kLate ? 56 : kFast ? 104 : 72;
  static constexpr int kMultiplyRegisters = kLate ? 224 : kFast ? 200 : 216;
  static constexpr int kChunkL = 64, kChunkBytesL = 64 * 128, kChunkBytesR = 64 * 128;
  static constexpr int kChunksL = kRows / kChunkL, kChunksR = 2 * kBlocks;
  // So many rows leave at a time, in a box. Few large boxes are faster. Tiles of wgrad end with a
  // box.
  static constexpr int kStoreChunk = 64, kStoreBuffers = kWide ? 2 : 4;
  using Epilogue = StagedSm90<kStoreChunk>;
  using ScalesOfBlocks =
      std::conditional_t<kRaggedK, WgradScales<kRows, 128 * kBlocks>,
                         std::conditional_t<kRowsFirst, MmRowScales<kRows>, MmScales<kRows>>>;
  using Scales = std::conditional_t<kFast, Nothing, ScalesOfBlocks>;
  static constexpr int kScaleWarps = kFast ? 0 : 1;
  static_assert(kFeedRegisters + 2 * kMultiplyRegisters <= 3 * 168);

  struct SharedMemory {
    using L = char[kPlanes][kChunksL * kChunkBytesL];
    using R = char[kPlanes][kChunksR * kChunkBytesR];
    alignas(1024) L l[kStages];
    alignas(1024) R r[kStages];
    alignas(1024) char staged[2][kStoreBuffers * kStoreChunk * (kWide ? 256 : 128)];
    alignas(16) Scales scales[kStages];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
    StoreBarriers<kStoreBuffers> stores;
    std::conditional_t<kRaggedK, RankedMatrices, Nothing> ranked;
  };
};

// A lane's share of the scales of kCount lines, block by block: those of every 32nd line. The scale
// of a line that is not there is 0.
template <int kCount>
class LineScales {
  static constexpr int kEach = kCount / 32;

 public:
  // line(i) is the line at place i, or -1.
  template <typename Line>
  __device__ LineScales(const RowScales& scales, Line line) : scales_(scales) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) lines_[i] = line(32 * i + threadIdx.x % 32);
  }

  __device__ void Load(int block) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = lines_[i] * scales_.line + block;
      values_[i] = lines_[i] < 0 ? 0.0f : __ldg(scales_.data + at);
    }
  }

  // put(place, value).
  template <typename Put>
  __device__ void Each(Put put) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) put(32 * i + threadIdx.x % 32, values_[i]);
  }

 private:
  const RowScales& scales_;
  int lines_[kEach];
  float values_[kEach];
};

// Puts a tile's scales into its stages: load(slice), then put(stage). Reads what the next slice
// needs before it waits for that slice's place.
template <typename Config, typename Load, typename Put>
__device__ void StageScales(typename Config::SharedMemory& memory, const Work& work,
                            Place<Config::kStages>& at, Load load, Put put) {
  if (work.slices > 0) load(work.Slice(0));
#pragma unroll 1
  for (int turn = 0; turn < work.slices; ++turn) {
    Wait(&memory.empty[at.index], at.parity ^ 1);
    put(memory.scales[at.index]);
    __syncwarp();
    if (threadIdx.x % 32 < kArrivingLanes) Arrive(&memory.full[at.index]);
    at.Next();
    if (turn + 1 < work.slices) load(work.Slice(turn + 1));
  }
}

// wgrad: a tile's scales, of both operands, lie one after the other (see BlockScales).
template <typename Config>
__device__ void CopyScales(const Fp8GemmSm90& fp8, typename Config::SharedMemory& memory,
                           const Work& work, Place<Config::kStages>& at) {
  const int lane = threadIdx.x % 32;
  const int row_bytes = max(work.rows + 63, 0) / 64 * kStagedRows * 4;
  const int column_bytes = max(work.columns + 3, 0) / 4 * 16;
  const float* rows = fp8.l_scales.data + work.l_row / 64 * kStagedRows;
  const float* columns = fp8.r_scales.data + work.out_column;
#pragma unroll 1
  for (int turn = 0; turn < work.slices; ++turn) {
    Wait(&memory.empty[at.index], at.parity ^ 1);
    auto& scales = memory.scales[at.index];
    uint64_t* full = &memory.full[at.index];
    if (lane == 0) {
      const int block = work.Slice(turn);
      ArriveExpecting(full, row_bytes + column_bytes);
      if (row_bytes > 0) {
        CopyBytes(rows + (work.l_k / kSliceSm90 + block) * fp8.l_scales.block, full,
                  scales.rows.values, row_bytes);
      }
      if (column_bytes > 0) {
        CopyBytes(columns + (work.r_k / kSliceSm90 + block) * fp8.r_scales.block, full,
                  scales.columns, column_bytes);
      }
    } else if (lane < kArrivingLanes) {
      Arrive(full);
    }
    __syncwarp();
    at.Next();
  }
}

// The warp that reads scales, and puts them into stages.
template <typename Config>
__device__ void ScaleWarp(const Fp8GemmSm90& fp8, typename Config::SharedMemory& memory) {
  constexpr int kRows = Config::kRows;
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    if constexpr (Config::kRaggedK) {
      CopyScales<Config>(fp8, memory, work, at);
    } else {
      using Rows = StagedScales<kRows>;
      LineScales<kRows> rows(fp8.x_scales,
                             [&](int i) { return i < work.rows ? work.l_row + i : -1; });
      // A scale is for 128 columns. Behind the last column any scale will do.
      const int last = fp8.w_scales.columns - 1;
      const float* of_columns[2];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int64_t column = static_cast<int64_t>(work.weight) * fp8.w_scales.columns +
                               min(work.out_column / 128 + g, last);
        of_columns[g] = fp8.w_scales.data + column * fp8.w_scales.blocks;
      }
      float w[2];
      const auto load = [&](int slice) {
        rows.Load(slice);
#pragma unroll
        for (int g = 0; g < 2; ++g) w[g] = __ldg(of_columns[g] + slice);
      };
      StageScales<Config>(memory, work, at, load, [&](auto& scales) {
        if constexpr (Config::kRowsFirst) {
          rows.Each([&](int i, float value) { scales.rows[i] = value; });
          if (threadIdx.x % 32 == 0) scales.columns[0] = w[0], scales.columns[1] = w[1];
        } else {
          rows.Each([&](int i, float value) {
#pragma unroll
            for (int g = 0; g < 2; ++g) scales.rows[g].values[Rows::Place(i)] = value * w[g];
          });
        }
      });
    }
  });
}

// As StagedSm90::StageFloats, but reads the thread's number anew, of which it makes addresses.
// There are no registers to keep them through the products.
template <int kRows>
__device__ __forceinline__ void StageFloatsAnew(const float* sums, char* staged) {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const uint32_t lane = thread % 32, line = thread % 128 / 32 * 16 + lane / 4;
  float* to = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int block = 0; block < kRows / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = 8 * block + lane % 4 * 2 + i % 2, column = line + i / 2 * 8;
      to[(column / 32 * kRows + row) * 32 + (column % 32 ^ (row % 8 * 4))] = sums[4 * block + i];
    }
  }
}

// How many chunks a warpgroup has staged: a Place in one register.
template <int kPlaces>
struct CountedPlace {
  static_assert((kPlaces & (kPlaces - 1)) == 0);
  uint32_t count = 0;

  __device__ Place<kPlaces> Next() {
    const uint32_t now = count++;
    return {static_cast<int>(now % kPlaces), now / kPlaces % 2};
  }
};

// A warpgroup's share of a tile leaves in so many chunks.
template <typename Config>
constexpr int kChunksOfFp8 =
    Config::kRowsFirst ? 4 : Config::kBlocks * (Config::kRows / Config::kStoreChunk);

template <typename Config>
__device__ ChunkPlace PlaceOfFp8Chunk(int chunk, int group) {
  if (Config::kRowsFirst) return {64 * group, 64 * chunk};
  constexpr int kEach = Config::kRows / Config::kStoreChunk;
  return {chunk % kEach * Config::kStoreChunk, 128 * group + 64 * (chunk / kEach)};
}

// The result of a warpgroup's tile, rounded, two numbers a word. It leaves while the next tile is
// multiplied.
template <typename Config>
class LateFp8Tile {
 public:
  __device__ __forceinline__ LateFp8Tile() {
#pragma unroll
    for (auto& chunk : words_) {
#pragma unroll
      for (uint32_t& word : chunk) asm volatile("" : "=r"(word));  // anything, and not zeros
    }
  }

  // Keeps sums times `scale`.
  template <typename Sums>
  __device__ __forceinline__ void Keep(const Sums& sums, float scale, const Work& work, int group) {
    chunks_ = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (PlaceOfFp8Chunk<Config>(chunk, group).In(work)) chunks_ |= 1u << chunk;
      const float* from = &sums[0][0] + chunk * 2 * kWords;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words_[chunk][i] = PackScaled(from[2 * i], from[2 * i + 1], scale);
      }
    }
  }

  template <typename Counted>
  __device__ __forceinline__ void Stage(typename Config::SharedMemory& memory, int group,
                                        Counted& staged_chunks) {
    static_assert(kChunks <= Config::kStoreBuffers);
    const Counted before = staged_chunks;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if ((chunks_ >> chunk & 1) == 0) continue;
      const auto place = staged_chunks.Next();
      Wait(&memory.stores.empty[group][place.index], place.parity ^ 1);
      Config::Epilogue::StageWords(words_[chunk], Buffer<Config>(memory, group, place.index),
                                   Config::kStoreChunk / 8);
    }
    FenceAsyncProxy();  // one for all chunks
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
#pragma unroll 1
    for (Counted each = before; each.count != staged_chunks.count;) {
      Arrive(&memory.stores.full[group][each.Next().index]);
    }
  }

 private:
  static_assert(std::is_same_v<typename Config::Element, cutlass::bfloat16_t>);

  // Volatile, so that no more numbers are on their way than there are registers for.
  __device__ __forceinline__ static uint32_t PackScaled(float low, float high, float scale) {
    uint32_t word;
    asm volatile(
        "{\n.reg .f32 low, high;\n"
        "mul.rn.f32 low, %1, %3;\n"
        "mul.rn.f32 high, %2, %3;\n"
        "cvt.rn.bf16x2.f32 %0, high, low;\n}"
        : "=r"(word)
        : "f"(low), "f"(high), "f"(scale));
    return word;
  }

  static constexpr int kChunks = kChunksOfFp8<Config>, kWords = Config::kStoreChunk / 4;
  uint32_t chunks_ = 0, words_[kChunks][kWords];
};

// One of the two warpgroups that multiply.
template <typename Config>
__device__ __forceinline__ void MultiplyFp8Warpgroup(const Fp8GemmSm90& fp8,
                                                     typename Config::SharedMemory& memory,
                                                     int group) {
  using Promoting =
      std::conditional_t<Config::kRowsFirst, Fp8RowProducts<Config>, Fp8Products<Config>>;
  using P = std::conditional_t<Config::kFast, Fp8FastProducts<Config>, Promoting>;
  using T = typename Config::Element;
  Place<Config::kStages> at;
  CountedPlace<Config::kStoreBuffers> staged_chunks;
  std::conditional_t<Config::kLate, LateFp8Tile<Config>, Nothing> late;
  ForEachWork<Config>(memory, [&](const Work& work) __attribute__((always_inline)) {
    typename P::Sums sums;
    if constexpr (Config::kLate) {
      const float scale = P::MultiplyTile(fp8.matrix_scales, memory, work, group, at, sums,
                                          [&] { late.Stage(memory, group, staged_chunks); });
      return late.Keep(sums, scale, work, group);
    } else if constexpr (Config::kFast) {
      const float scale =
          P::MultiplyTile(fp8.matrix_scales, memory, work, group, at, sums, Nothing{});
#pragma unroll
      for (auto& of_block : sums) {
#pragma unroll
        for (float& sum : of_block) sum *= scale;
      }
    } else {
      P::MultiplyTile(memory, work, group, at, sums);
    }
    constexpr int kChunk = Config::kStoreChunk, kChunks = kChunksOfFp8<Config>;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!PlaceOfFp8Chunk<Config>(chunk, group).In(work)) continue;
      Place<Config::kStoreBuffers> store = staged_chunks.Next();
      StageChunk<Config>(memory, group, store, [&](char* staged) {
        const float* from = &sums[0][0] + chunk * (kChunk / 2);
        if constexpr (Config::kRowsFirst) {
          StageColumns<kChunk>(staged, kChunk / 8, [&](int word) {
            return Pack<T>(from[2 * word], from[2 * word + 1]);
          });
        } else if constexpr (Config::kWide) {
          StageFloatsAnew<kChunk>(from, staged);
        } else {
          Config::Epilogue::template StageHalvesOf<T>(from, staged, kChunk / 8);
        }
      });
    }
  });
  if constexpr (Config::kLate) late.Stage(memory, group, staged_chunks);
}

// The warp that stores. It takes a tile's chunks of both warpgroups in turns.
template <typename Config>
__device__ void StoreFp8Warp(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  Place<Config::kStoreBuffers> places[2];
  uint64_t* before = nullptr;  // of the buffer that is being stored
  ForEachWork<Config>(memory, [&](const Work& work) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunksOfFp8<Config>; ++chunk) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const auto [first, column] = PlaceOfFp8Chunk<Config>(chunk, group);
        if (first >= work.rows || column >= work.columns) continue;
        auto& at = places[group];
        Wait(&memory.stores.full[group][at.index], at.parity);
        const char* staged = Buffer<Config>(memory, group, at.index);
        const int rows = min(Config::kStoreChunk, work.rows - first);
#pragma unroll
        for (int half = 0; half < (Config::kWide ? 2 : 1); ++half) {
          if (column + 32 * half >= work.columns) continue;
          StoreChunk<Config>(gemm, work, staged + half * Config::kStoreChunk * 128,
                             column + 32 * half, first, rows);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          CommitStores();
          // All but this one have been read.
          if (before != nullptr) {
            WaitStored<1>();
            Arrive(before);
          }
          before = &memory.stores.empty[group][at.index];
        }
        __syncwarp();
        at.Next();
      }
    }
    if (before != nullptr) {
      WaitStored<0>();
      Arrive(before);
      before = nullptr;
    }
    __syncwarp();
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    Fp8GemmSm90Kernel(const __grid_constant__ Fp8GemmSm90 fp8) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const GemmSm90& gemm = fp8.gemm;
  const int block = BlockInCluster(), warp = threadIdx.x / 32;
  if (threadIdx.x == 32) {
    memory.stores.Init(1);
    // A stage is full when one thread's copies and the scales are there. Warps 1, 2 and 3 read
    // tiles of work.
    constexpr int kScaleWarps = Config::kScaleWarps;
    InitRings<Config>(memory, 1 + kScaleWarps * kArrivingLanes, 2 + kScaleWarps);
    Prefetch(&gemm.l_map);
    Prefetch(&gemm.r_map);
    Prefetch(&gemm.out_map);
  }
  if (warp == 3) PrefetchSizes(gemm);
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 2) {
      if constexpr (!Config::kFast) ScaleWarp<Config>(fp8, memory);
    } else if (warp == 3) {
      StoreFp8Warp<Config>(gemm, memory);
    } else if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else {
      if (threadIdx.x % 32 == 0) CopyThread<Config>(gemm, memory, block);
      __syncwarp();
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyFp8Warpgroup<Config>(fp8, memory, warp / 4 - 1);
  }
  ClusterSync();
}

}  // namespace jgg::device

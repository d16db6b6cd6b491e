// The kernel. A thread block is three warpgroups. Two multiply, 64 columns each (kBlocks times),
// and store; warps of the third feed them:
//   warp 0  schedules: puts tiles of work into a short ring
//   warp 1  copies slices of L and R into a ring of kStages, by TMA
//   warp 2  clears what lies behind the end of a segment within a slice of k
//   warp 3  stores results that need nothing but rounding, or adds float32 ones to what is there
// Every place of a ring has a pair of barriers, "full" and "empty". Nothing else is shared, so a
// warpgroup stores its results while the others go on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "grouped_mm/device/epilogue_sm90.cuh"
#include "grouped_mm/device/gates_apart_sm90.cuh"
#include "grouped_mm/device/policies_sm90.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "grouped_mm/device/split_products_sm90.cuh"
#include "grouped_mm/device/store_sm90.cuh"

namespace jgg::device {

// Rows by list: where those of a tile are, -1 for none.
template <int kRows>
struct TileRows {
  int x[kRows], y[kRows];
};

template <>
struct TileRows<0> {};

// The constants of a kernel, from its three policies (policies_sm90.cuh). A tile is kRows rows (of
// L) x kBlocks * 128 columns (of R). A gated tile has 128 gates in block 0, and in block 1 the
// values that they let through. In shared memory both operands are chunks of (up to) 64 rows or
// columns, each a swizzled tile of its own. float32 operands have kPlanes of each.
template <typename Loader, typename Products, typename Store>
struct GemmSm90Config : Loader, Products, Store {
  using Loader::kStages, Loader::kCluster, Loader::kByList, Loader::kStacked;
  using Products::kLKMajor, Products::kRKMajor, Products::kRows, Products::kBlocks,
      Products::kPlanes;
  using Store::kWide, Store::kGates, Store::kBackward;
  using typename Products::Element;
  static constexpr bool kRowsByList = kByList == ByList::kRowsOfBoth;
  // Warps that schedule and copy gather one operand, too.
  static constexpr bool kOperandByList = kByList != ByList::kNothing && !kRowsByList;
  static constexpr bool kGoesBack = kBackward != Activation::kNone;
  static constexpr int kScheduledBlocks = kGates && kBlocks == 1 ? kGateApart : kBlocks;
  // Only mm has kernels with an activation.
  static constexpr bool kRaggedK = !kRowsByList && kBlocks == 1 && !kGates && !kStacked;
  static constexpr bool kBalances = kRaggedK && kCluster == 2;  // others are of few tiles
  static constexpr int kThreads = 384, kWorks = 4;              // tiles in the ring of work
  // Registers of a thread that feeds, and of one that multiplies. One warpgroup feeds and two
  // multiply. Every thread begins with 168, so the three share three times that. A kernel that asks
  // for more waits for ever.
  static constexpr bool kFeedsMore = kByList != ByList::kNothing || kWide || kGates;
  static constexpr bool kFeedsMost = kPlanes > 1 || kByList == ByList::kLinesOfR;
  static constexpr int kFeedRegisters = kFeedsMost ? 88 : kFeedsMore ? 72 : 56;
  static constexpr int kMultiplyRegisters = kFeedsMost ? 208 : kFeedsMore ? 216 : 224;
  static_assert(kFeedRegisters + 2 * kMultiplyRegisters <= 3 * 168);
  // More rows than a product takes are done in halves.
  static constexpr int kHalves = kRows > 256 ? 2 : 1;
  static constexpr int kChunkL = kRows < 64 || kRows % 64 != 0 ? 32 : 64;
  static constexpr int kChunkBytesL = kChunkL * 128, kChunkBytesR = 64 * 128;
  static constexpr int kChunksL = kRows / kChunkL, kChunksR = 2 * kBlocks;
  static_assert(kLKMajor || kChunkL == 64);
  static_assert(kHalves == 1 || kBlocks == 1);
  static_assert(kPlanes == 1 || (kHalves == 1 && kBlocks == 1));
  static_assert(!kRowsByList || (kLKMajor && kHalves == 1 && kPlanes == 1 && kCluster == 1));
  static constexpr bool kStoreWarp =
      (kBlocks == 1 || kOperandByList) && kRows >= 128 && kPlanes == 1 && !kRowsByList;
  // As many sums as a warpgroup has room for.
  static constexpr bool kLarge = kRows == 256 || (kBlocks == 2 && kOperandByList);
  // Whether the first product of a tile begins its sums. Nothing has to zero 128 registers then.
  // Tiles without slices go another way. ptxas serializes such products (C7511) where there are
  // many loops, or where an operand is K-major, whose addresses take more registers.
  static constexpr bool kNeedsSlices =
      !kLKMajor && !kRKMajor && kRows == 256 && kPlanes == 1 && !kWide;
  // The store warp takes so many rows of the result at a time, in boxes of Epilogue::kChunk rows.
  // Each warpgroup has so many buffers for them.
  static constexpr int kStoreChunk = kWide ? 32 : kLarge && !kGoesBack ? 128 : kChunkL;
  static constexpr int kStoreBuffers = kWide ? 4 : kLarge && !kGoesBack ? 1 : 2;
  // So many of a tile's last chunks wait until the next tile is multiplied. Larger tiles leave no
  // registers for any. Smaller tiles have no more chunks than buffers.
  static constexpr int kLateChunks = kStoreWarp && kLarge && !kGoesBack ? (kWide ? 2 : 1) : 0;
  // Late chunks leave no registers for scales. Where x is transposed, and in wgrad, ptxas
  // serializes the products (C7510) of a kernel with a bias.
  static constexpr Own kOwn = !kLKMajor         ? Own::kNothing
                              : kLateChunks > 0 ? Own::kBias
                                                : Own::kBiasAndScales;
  // Rows by list take shared memory. Smaller chunks of the result leave it to them.
  using Epilogue = EpilogueSm90<kRowsByList || kWide ? 32 : kChunkL, kRowsByList, false, kOwn>;
  static constexpr int kStagedBytes =
      kStoreWarp ? kStoreBuffers * kStoreChunk * (kWide ? 256 : 128) : Epilogue::kBytes;

  struct SharedMemory {
    using L = char[kPlanes][kChunksL * kChunkBytesL];  // a stage of it
    using R = char[kPlanes][kChunksR * kChunkBytesR];
    alignas(1024) L l[kStages];
    alignas(1024) R r[kStages];
    alignas(1024) char staged[2][kStagedBytes];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages], cleared[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
    StoreBarriers<kStoreBuffers> stores;
    std::conditional_t<kRaggedK, RankedMatrices, Nothing> ranked;
    TileRows<kRowsByList ? kRows : 0> rows[kWorks];
  };
};

// How many values of k of a tile's last slice are multiplied.
template <typename Config>
__device__ int MultipliedK(int last) {
  return Config::kPlanes == 1 ? (last + 15) / 16 * 16 : kSliceSm90;
}

// Copies slices of operands. Its members are the same for all slices of a product.
template <typename Config>
struct Copier {
  static constexpr bool kPair = Config::kCluster == 2;
  static constexpr bool kCopiesL =
      Config::kByList == ByList::kNothing || Config::kByList == ByList::kLinesOfR;
  static constexpr int kChunksR = Config::kByList == ByList::kLinesOfR ? 0 : Config::kChunksR;

  const GemmSm90& gemm;
  const int block;
  const bool gated = IsGated(gemm.epilogue.activation);
  const int shared_columns = SharedColumns<Config>(gemm);

  // One thread copies the slice of this turn into a stage.
  __device__ __forceinline__ void CopySlice(typename Config::SharedMemory& memory, const Work& work,
                                            int turn, int chunks, bool shares, int stage) const {
    const int slice = work.Slice(turn);
    uint64_t* full = &memory.full[stage];
    // An MN-major operand lies in lines of k. Of its last slice, only the lines that are multiplied
    // are copied.
    const int last = turn == 0 ? MultipliedK<Config>(work.last) : kSliceSm90;
    const int lines = !gemm.wgrad || last > 32 ? kSliceSm90 : last;
    const CUtensorMap* l_map = &gemm.l_map;
    const CUtensorMap* r_map = &gemm.r_map;
    if (!Config::kLKMajor && lines < kSliceSm90) l_map = &gemm.rest_maps.l[lines / 32];
    if (!Config::kRKMajor && lines < kSliceSm90) r_map = &gemm.rest_maps.r[lines / 32];
    const int l_bytes = Config::kLKMajor ? Config::kChunkBytesL : lines * 128;
    const int r_bytes = Config::kRKMajor ? Config::kChunkBytesR : lines * 128;
    ArriveExpecting(full, Config::kPlanes * (chunks * l_bytes + kChunksR * r_bytes));
    const int l_k = work.l_k + slice * kSliceSm90, r_k = work.r_k + slice * kSliceSm90;
#pragma unroll 1
    for (int plane = 0; plane < Config::kPlanes; ++plane) {
      const int l_plane = plane * gemm.l_plane, r_plane = plane * gemm.r_plane;
#pragma unroll
      for (int i = 0; i < kChunksR; ++i) {
        if (Config::kStacked && i % 2 != block) continue;  // the other block's half
        const int column = Config::kGates ? work.out_column + i / 2 * 64 + i % 2 * (gemm.n / 2)
                                          : work.out_column + i % 2 * 64 +
                                                (gated ? i / 2 * (gemm.n / 2) : i / 2 * 128);
        char* to = memory.r[stage][plane] + i * Config::kChunkBytesR;
        const int weight = gemm.wgrad ? 0 : work.weight;
        if constexpr (Config::kRKMajor) {
          CopyBox<Config::kStacked>(r_map, full, to, r_plane + r_k, column, weight);
        } else {
          CopyBox<Config::kStacked>(r_map, full, to, r_plane + column, r_k, weight);
        }
      }
      // These are two loops, because small chunks wait for the thread that copies.
      auto copy_l = [&](int i, auto multicast) {
        const int row = work.l_row + i * Config::kChunkL;
        char* to = memory.l[stage][plane] + i * Config::kChunkBytesL;
        if constexpr (Config::kLKMajor) {
          CopyBox<multicast.value>(l_map, full, to, l_plane + l_k, row, 0);
        } else {
          CopyBox<multicast.value>(l_map, full, to, l_plane + row, l_k, 0);
        }
      };
      if constexpr (kCopiesL) {
        if (shares) {
#pragma unroll 1
          for (int i = block; i < chunks; i += 2) copy_l(i, Constant<kPair>{});
        } else {
#pragma unroll 1
          for (int i = 0; i < chunks; ++i) copy_l(i, Constant<0>{});
        }
      }
    }
  }

  __device__ int Chunks(const Work& work) const {
    return kCopiesL ? (work.rows + Config::kChunkL - 1) / Config::kChunkL : 0;
  }
  __device__ bool Shares(const Work& work) const { return work.out_column < shared_columns; }
};

// One thread copies all operands that do not come by list.
template <typename Config>
__device__ void CopyThread(const GemmSm90& gemm, typename Config::SharedMemory& memory, int block) {
  const Copier<Config> copier{gemm, block};
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const int chunks = copier.Chunks(work);
    const bool shares = copier.Shares(work);
#pragma unroll 1
    for (int turn = 0; turn < work.slices; ++turn) {
      Wait(&memory.empty[at.index], at.parity ^ 1);
      copier.CopySlice(memory, work, turn, chunks, shares, at.index);
      at.Next();
    }
  });
}

// A mask that keeps the 16-bit values [from, to) of a piece of 8.
__device__ inline uint4 Halves(int from, int to) {
  const auto word = [&](int i) {
    return (2 * i >= from && 2 * i < to ? 0xffffu : 0u) |
           (2 * i + 1 >= from && 2 * i + 1 < to ? 0xffff0000u : 0u);
  };
  return make_uint4(word(0), word(1), word(2), word(3));
}

__device__ inline uint4 operator&(uint4 a, uint4 b) {
  return make_uint4(a.x & b.x, a.y & b.y, a.z & b.z, a.w & b.w);
}

// One warp zeros the values of k in [0, first) and [last, end), in `chunks` chunks of `lines` rows
// or columns. `first` is less than a piece.
template <bool kKMajor>
__device__ void Clear(char* tile, int chunks, int lines, int first, int last, int end) {
  if (first == 0 && last == end) return;
  const int lane = threadIdx.x % 32;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  if constexpr (kKMajor) {
    // Each row is a line of 128 bytes, and its pieces of 16 bytes are swizzled by the row. The
    // segment begins in the tile's first piece and may end within another. Those two keep what is
    // the segment's.
    const uint4 from_first = Halves(first, 8), to_last = Halves(0, last % 8);
#pragma unroll 4
    for (int row = lane; row < chunks * lines; row += 32) {
      const auto at = [&](int piece) -> uint4& {
        return *reinterpret_cast<uint4*>(tile + row * 128 + (piece ^ (row % 8)) * 16);
      };
      if (first > 0) at(0) = at(0) & from_first;
      if (last % 8 != 0) at(last / 8) = at(last / 8) & to_last;
      for (int piece = (last + 7) / 8; piece < end / 8; ++piece) at(piece) = zeros;
    }
  } else {
    // Each k is a line of 128 bytes.
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint4* pieces = reinterpret_cast<uint4*>(tile + chunk * kSliceSm90 * 128);
      for (int piece = lane; piece < first * 8; piece += 32) pieces[piece] = zeros;
      for (int piece = last * 8 + lane; piece < end * 8; piece += 32) pieces[piece] = zeros;
    }
  }
}

// wgrad: this warp clears what lies before and behind a segment, which belongs to others. It clears
// both operands, since 0 * NaN is NaN.
template <typename Config>
__device__ void ClearWarp(typename Config::SharedMemory& memory) {
  Place<Config::kStages> at, cleared;
  ForEachWork<Config>(memory, [&](const Work& work) {
    for (int turn = 0; turn < work.slices; ++turn) {
      const int slice = work.Slice(turn);
      Wait(&memory.full[at.index], at.parity);  // of every slice, or its parity would mean nothing
      if (work.Cut(slice)) {
        const int chunks = (work.rows + Config::kChunkL - 1) / Config::kChunkL;
        const int first = slice == 0 ? work.first : 0;
        const int last = turn == 0 ? work.last : kSliceSm90;
        const int end = MultipliedK<Config>(last);
#pragma unroll 1
        for (int plane = 0; plane < Config::kPlanes; ++plane) {
          Clear<Config::kLKMajor>(memory.l[at.index][plane], chunks, Config::kChunkL, first, last,
                                  end);
          Clear<Config::kRKMajor>(memory.r[at.index][plane], Config::kChunksR, 64, first, last,
                                  end);
        }
        FenceAsyncProxy();
        Arrive(&memory.cleared[cleared.index]);
        cleared.Next();
      }
      at.Next();
    }
  });
}

template <int kHalves, int kSums>
__device__ void Scale(float (&sums)[kHalves][kSums], float scale) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[half][i] *= scale;
  }
}

// One of the two warpgroups that multiply. It has to be inlined, whatever its size, and so has the
// work on a tile. Where a part of the products is in another function, ptxas serializes them
// (C7510).
template <typename Config>
__device__ __forceinline__ void MultiplyWarpgroup(const GemmSm90& gemm,
                                                  typename Config::SharedMemory& memory,
                                                  int group) {
  constexpr bool kWgrad = Config::kRaggedK && Config::kHalves == 1;  // whether it may be one
  typename Config::Epilogue epilogue(gemm, memory.staged[group], 1 + group);
  Place<Config::kStages> at, cleared;
  Place<Config::kStoreBuffers> store;
  std::conditional_t<(Config::kLateChunks > 0), LateChunks<Config>, NoLateChunks> late;
  ForEachWork<Config>(memory, [&](const Work& work) __attribute__((always_inline)) {
    if (Config::kNeedsSlices && work.slices == 0) {
      // The store warp waits for the late chunks, so they go first. It may lag by as many works as
      // the ring has places, and no more.
      late.StageAll(memory, group, store);
      if constexpr (Config::kTransposed) return StoreZeroLines(gemm, work, 64 * group);
      return epilogue.StoreZeros(work, 64 * group);
    }
    using P = std::conditional_t<Config::kPlanes == 1, Products<Config>, SplitProducts<Config>>;
    typename P::Sums sums;
    const int rows = P::MultiplyTile(memory, work, gemm.wgrad, group, at, cleared, sums,
                                     [&] { late.TryStageFirst(memory, group, store); });
    late.StageAll(memory, group, store);
    if (!Config::kGates && 64 * group >= work.columns) return;
    if constexpr (Config::kGates || Config::kOperandByList) {
      using T = typename Config::Element;
      StageTile<Config, T>(gemm, memory, work, group, store, sums, late);
    } else if constexpr (Config::kWide) {
      const bool scaled = gemm.matrix_scale != nullptr;
      const float scale = scaled ? __ldg(gemm.matrix_scale + work.weight) : 1.0f;
      StageTile<Config, float>(gemm, memory, work, group, store, sums, late, scale);
    } else {
      if constexpr (kWgrad) {
        if (gemm.matrix_scale != nullptr) Scale(sums, __ldg(gemm.matrix_scale + work.weight));
      }
      if constexpr (Config::kStoreWarp) {
        if (gemm.store_warp) {
          if (gemm.out_dtype == DType::kBF16) {
            StageTile<Config, cutlass::bfloat16_t>(gemm, memory, work, group, store, sums, late);
          } else {
            StageTile<Config, cutlass::half_t>(gemm, memory, work, group, store, sums, late);
          }
          return;
        }
      }
      if constexpr (Config::kHalves == 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Work part = work;
          part.rows = min(rows, work.rows - half * rows);
          part.out_row += half * rows;
          part.out += half * rows * gemm.out_line;
          epilogue.Store(part, 64 * group, sums[half]);
        }
      } else if constexpr (Config::kBlocks == 1) {
        epilogue.Store(work, 64 * group, sums[0]);
      } else {
        epilogue.StoreGated(work, 64 * group, sums[0], sums[1]);
      }
    }
  });
  late.StageAll(memory, group, store);
  WaitStored<0>();  // shared memory must outlive its last copy
}

// One thread.
template <typename Config>
__device__ void InitGemm(const GemmSm90& gemm, typename Config::SharedMemory& memory) {
  for (uint64_t& cleared : memory.cleared) Init(&cleared, 32);
  constexpr int kGating = Config::kGates ? kGateWarps : 0;
  constexpr int kGathering =
      Config::kOperandByList ? 2 : 0;  // of them, the one that copies counts anyway
  memory.stores.Init(Config::kGates ? kGateWarps : 1);
  InitRings<Config>(memory, 1 + 32 * kGathering,
                    1 + kGathering / 2 + (kGating > 0 ? kGating : gemm.wgrad + gemm.store_warp));
  if (Config::kByList != ByList::kRowsOfL) Prefetch(&gemm.l_map);
  if (Config::kByList != ByList::kLinesOfR) Prefetch(&gemm.r_map);
  if (gemm.stores_boxes) Prefetch(&gemm.out_map);
}

// Two of the four warps that feed. They neither schedule nor copy.
template <typename Config>
__device__ __forceinline__ void OtherWarp(const GemmSm90& gemm,
                                          typename Config::SharedMemory& memory, int warp) {
  if constexpr (Config::kGates) {
    GateWarp<Config>(gemm, memory, warp - 2);
  } else if (warp == 2 && gemm.wgrad) {
    ClearWarp<Config>(memory);
  } else if (warp == 3 && gemm.store_warp) {
    if constexpr (Config::kStoreWarp && Config::kBlocks == 2) {
      StoreBlocksWarp<Config>(gemm, memory);
    } else if constexpr (Config::kStoreWarp) {
      StoreWarp<Config>(gemm, memory);
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    GemmSm90Kernel(const __grid_constant__ GemmSm90 gemm) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const int block = Config::kCluster == 1 ? 0 : BlockInCluster();
  const int warp = threadIdx.x / 32;
  // Not of the warp whose schedule comes first.
  if (threadIdx.x == 32) InitGemm<Config>(gemm, memory);
  if (warp == 3) PrefetchSizes(gemm);
  if constexpr (Config::kRaggedK) {
    if (gemm.order.ranks) RankMatrices<Config>(gemm, memory.ranked);
  }
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) CopyThread<Config>(gemm, memory, block);
      __syncwarp();
    } else {
      OtherWarp<Config>(gemm, memory, warp);
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyWarpgroup<Config>(gemm, memory, warp / 4 - 1);
  }
  // Until the other block ends, it may copy into this one and arrive at its barriers.
  if (Config::kCluster == 2) ClusterSync();
}

}  // namespace jgg::device

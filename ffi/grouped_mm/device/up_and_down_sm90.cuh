// Two products in one kernel, the second of which has the first one's result for x. Blocks take
// tiles in order, those of the first product before those of the second. So no block ends between
// the two products, and the second's first weights come while the first's last tiles are
// multiplied.
//
// A tile of the second product needs all columns of its rows of the first. A block takes a tile
// when it begins the one before. It waits for tiles that were taken earlier, by blocks that have
// begun. So there is always one that waits for nobody, however many blocks have room. Who takes a
// tile does not change its sums.
#pragma once

#include <cstdint>

#include "grouped_mm/device/gemm_sm90.cuh"
#include "grouped_mm/up_and_down_sm90.h"

namespace jgg::device {

// Which of the products a tile is of: in a member of Work that mm does not use.
__device__ inline int& ProductOf(Work& work) { return work.first; }
__device__ inline int ProductOf(const Work& work) { return work.first; }

__device__ inline int ReadAcquiring(const int32_t* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline void AddReleasing(int32_t* to, int count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}

// Ordinary stores to global memory, and tensor copies that read them.
__device__ inline void FenceGlobalProxies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// How many warps store columns of a row of the first product, whose tiles have 128.
__device__ inline int WarpsOfRows(const GemmSm90& up) {
  return (up.n / 2 + 127) / 128 * kMultiplyWarps;
}

// A warp has stored its columns of a tile of the first product.
__device__ inline void TellStored(int32_t* turns, const Work& work) {
  FenceGlobalProxies();
  __syncwarp();
  if (threadIdx.x % 32 == 0) AddReleasing(turns + 1 + work.out_row, 1);
}

// One thread waits until a tile of the second product can read its rows.
__device__ inline void WaitForRows(const int32_t* turns, const Work& work, int warps) {
  while (ReadAcquiring(turns + 1 + work.l_row) < warps) {
  }
  FenceGlobalProxies();
}

// Tiles by their numbers, which rise.
template <typename Config>
class NumberedTiles : public ScheduleSm90<Config::kRows, Config::kScheduledBlocks, 1, false> {
 public:
  __device__ explicit NumberedTiles(const GemmSm90& gemm)
      : ScheduleSm90<Config::kRows, Config::kScheduledBlocks, 1, false>(gemm, 0, 1, nullptr) {}

  __device__ Work At(int number) {
    this->next_ = number;
    return this->Next();
  }

  // Known once a tile behind the last one was asked for.
  __device__ int TilesInAll() const { return this->window_tiles_; }
};

// Takes tiles and puts them into the ring of work.
template <typename Config>
__device__ void TakeTiles(const GemmSm90& up, const GemmSm90& down, int32_t* turns,
                          typename Config::SharedMemory& memory) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const auto take = [&] {
    int number = 0;
    if (lane == 0) number = atomicAdd(turns, 1);
    return __shfl_sync(kAll, number, 0);
  };
  Place<Config::kWorks> at;
  const auto put = [&](const Work& work) {
    __syncwarp();
    if (lane == 0) {
      memory.works[at.index] = work;
      Arrive(&memory.work_full[at.index]);
    }
    __syncwarp();
    at.Next();
    Wait(&memory.work_empty[at.index], at.parity ^ 1);
  };
  int number = take(), before = 0;
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    NumberedTiles<Config> tiles(which == 0 ? up : down);
    while (true) {
      Work work = tiles.At(number - before);
      if (work.rows == 0) break;
      ProductOf(work) = which;
      put(work);
      number = take();
    }
    before += tiles.TilesInAll();
  }
  put(Work{});
}

// ---- weights of 16 bits ----

template <typename Kernel>
struct DenseUpAndDownConfig
    : GemmSm90Config<typename Kernel::Loader, typename Kernel::Products, typename Kernel::Store> {
  using Base =
      GemmSm90Config<typename Kernel::Loader, typename Kernel::Products, typename Kernel::Store>;
  static constexpr int kWorks = 1;  // a block does not take tiles that others could begin earlier
  static_assert(Base::kBlocks == 2 && Base::kCluster == 1 && Base::kHalves == 1 && Base::kLKMajor);
};

// One thread.
template <typename Config>
__device__ void CopyBoth(const DenseUpAndDownSm90& both, typename Config::SharedMemory& memory) {
  const int warps = WarpsOfRows(both.products[0]);
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    if (ProductOf(work) == 1) WaitForRows(both.turns, work, warps);
    const Copier<Config> copier{both.products[ProductOf(work)], 0};
    const int chunks = copier.Chunks(work);
#pragma unroll 1
    for (int turn = 0; turn < work.slices; ++turn) {
      Wait(&memory.empty[at.index], at.parity ^ 1);
      copier.CopySlice(memory, work, turn, chunks, false, at.index);
      at.Next();
    }
  });
}

// One of the two warpgroups that multiply.
template <typename Config>
__device__ __forceinline__ void MultiplyBoth(const DenseUpAndDownSm90& both,
                                             typename Config::SharedMemory& memory, int group) {
  using P = Products<Config>;
  Place<Config::kStages> at, cleared;
  ForEachWork<Config>(memory, [&](const Work& work) __attribute__((always_inline)) {
    const int which = Uniform(ProductOf(work));
    typename P::Sums sums;
    P::MultiplyTile(memory, work, false, group, at, cleared, sums);
    typename Config::Epilogue epilogue(both.products[which], memory.staged[group], 1 + group);
    if (which == 0) {
      epilogue.StoreGated(work, 64 * group, sums[0], sums[1]);
      TellStored(both.turns, work);
    } else {
#pragma unroll
      for (int b = 0; b < 2; ++b) epilogue.Store(work, 128 * b + 64 * group, sums[b]);
    }
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    DenseUpAndDownSm90Kernel(const __grid_constant__ DenseUpAndDownSm90 both) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 32) {
    InitRings<Config>(memory, 1, 1);
    for (const GemmSm90& gemm : both.products) {
      Prefetch(&gemm.l_map);
      Prefetch(&gemm.r_map);
    }
  }
  if (warp == 3) PrefetchSizes(both.products[0]);
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 0) {
      TakeTiles<Config>(both.products[0], both.products[1], both.turns, memory);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) CopyBoth<Config>(both, memory);
      __syncwarp();
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyBoth<Config>(both, memory, warp / 4 - 1);
  }
}

}  // namespace jgg::device

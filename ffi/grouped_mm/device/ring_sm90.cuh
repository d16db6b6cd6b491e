// Rings in shared memory: of stages of operands, which tensor copies fill and two warpgroups read,
// and of tiles of work. Every place has a pair of barriers, "full" and "empty".
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/device/balanced_sm90.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"

namespace jgg::device {

constexpr int kMultiplyWarps = 8;

// So many lanes of a warp say that it has read a stage or a tile of work. One is enough, after
// __syncwarp, which orders the others' reads. compute-sanitizer's racecheck seems not to follow
// that. So each lane may say it for itself there (tests/lib/sanitize.py).
#ifdef JGG_EVERY_LANE_ARRIVES
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// A place in a ring, and the parity of its barriers' next phase.
template <int kPlaces>
struct Place {
  int index = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++index == kPlaces) {
      index = 0;
      parity ^= 1;
    }
  }

  __device__ void Skip(int places) {
    const int turns = (index + places) / kPlaces;
    index += places - turns * kPlaces;
    parity ^= turns & 1;
  }
};

// By one thread: `copiers` threads fill a stage; `feeders` warps read the ring of work beside those
// that multiply, and `schedulers` lanes fill it.
template <typename Config>
__device__ void InitRings(typename Config::SharedMemory& memory, int copiers, int feeders,
                          int schedulers = 1) {
  for (int i = 0; i < Config::kStages; ++i) {
    Init(&memory.full[i], copiers);
    Init(&memory.empty[i], kMultiplyWarps * Config::kCluster * kArrivingLanes);
  }
  for (int i = 0; i < Config::kWorks; ++i) {
    Init(&memory.work_full[i], schedulers);
    Init(&memory.work_empty[i], (kMultiplyWarps + feeders) * kArrivingLanes);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// All threads that share the rings, or partial sums, meet here.
template <typename Config>
__device__ void SyncRings(int parts = 1) {
  if (Config::kCluster == 1 && (!Config::kSharesK || parts == 1)) {
    __syncthreads();
  } else {
    ClusterSync();
  }
}

// For a warp, whose lanes have come together; or for one thread that feeds by itself.
template <bool kWarp = true>
__device__ void ArriveFor(uint64_t* barrier) {
  if constexpr (!kWarp) {
    for (int i = 0; i < kArrivingLanes; ++i) Arrive(barrier);
  } else if (threadIdx.x % 32 < kArrivingLanes) {
    Arrive(barrier);
  }
}

// A warp that multiplies has read a stage, and tells every block that copies into it.
template <typename Config>
__device__ void Release(typename Config::SharedMemory& memory, int index) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    ArriveFor(&memory.empty[index]);
  } else if constexpr (kArrivingLanes == 1) {
    if (lane < Config::kCluster) ArriveAt(&memory.empty[index], lane);
  } else {
    for (int block = 0; block < Config::kCluster; ++block) ArriveAt(&memory.empty[index], block);
  }
}

// 0, which the compiler does not know. An arrival does not wait for the loads before it. Others'
// loads from global memory may delay them, and whoever fills the place next may overwrite it first.
// So the arrival's address depends on some bits of each load.
__device__ inline int ZeroAfter(uint32_t bits) { return static_cast<int>(bits & (gridDim.z - 1)); }

// Call f(work) for every tile in the ring of work, by a warp, or by one thread of it.
template <typename Config, bool kWarp = true, typename Function>
__device__ void ForEachWork(typename Config::SharedMemory& memory, Function f) {
  Place<Config::kWorks> at;
  while (true) {
    Wait(&memory.work_full[at.index], at.parity);
    const Work work = memory.works[at.index];
    if (kWarp) __syncwarp();
    ArriveFor<kWarp>(&memory.work_empty[at.index + ZeroAfter(work.OfEachLoad())]);
    at.Next();
    if (work.rows == 0) return;
    f(work);
  }
}

struct Nothing {
  template <typename... Arguments>
  __device__ void operator()(const Arguments&...) const {}
};

// Tiles that begin before this column share L with the other block of the cluster, and each block
// copies half of it for both. Of other tiles each block copies its own L.
template <typename Config>
__device__ int SharedColumns(const GemmSm90& gemm) {
  if (Config::kCluster == 1) return 0;
  return TileColumns<Config::kScheduledBlocks>(gemm) *
         OrderTiles<Config::kCluster, Config::kScheduledBlocks, Config::kStacked>(gemm)
             .SharedColumns();
}

// A warp fills the ring of work. All its lanes call add(work, place), which puts there what else
// belongs to a tile. Each lane then says that it has.
template <typename Config, typename Schedule, typename Function>
__device__ void FillWorks(const GemmSm90& gemm, typename Config::SharedMemory& memory, int block,
                          Schedule& schedule, Function add) {
  Place<Config::kWorks> at;
  while (true) {
    Work work = schedule.Next();
    if (Config::kSharesK) work.TakePart(block, gemm.parts);
    Wait(&memory.work_empty[at.index], at.parity ^ 1);
    add(work, at.index);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      memory.works[at.index] = work;
      Arrive(&memory.work_full[at.index]);
    } else if (!std::is_same_v<Function, Nothing>) {
      Arrive(&memory.work_full[at.index]);
    }
    __syncwarp();
    at.Next();
    if (work.rows == 0) return;
  }
}

// Calls f(schedule), by the warp that schedules.
template <typename Config, typename Function>
__device__ __forceinline__ void WithSchedule(const GemmSm90& gemm,
                                             typename Config::SharedMemory& memory, int block,
                                             Function f) {
  constexpr int kRows = Config::kRows, kBlocks = Config::kScheduledBlocks;
  constexpr int kCluster = Config::kCluster;
  RankedMatrices* ranked = nullptr;
  if constexpr (Config::kRaggedK) {
    ranked = &memory.ranked;
    if constexpr (Config::kBalances) {
      if (gemm.order.balances) {
        BalancedSm90<kRows, kBlocks, kCluster> schedule(gemm, block, ranked->Orders());
        return f(schedule);
      }
    }
  }
  ScheduleSm90<kRows, kBlocks, kCluster, Config::kRaggedK, Config::kStacked> schedule(
      gemm, Config::kSharesK ? 0 : block, Config::kSharesK ? gemm.parts : 1, ranked);
  f(schedule);
}

template <typename Config, typename Function = Nothing>
__device__ void ScheduleWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory, int block,
                             Function add = {}) {
  WithSchedule<Config>(gemm, memory, block, [&](auto& schedule) {
    FillWorks<Config>(gemm, memory, block, schedule, add);
  });
}

}  // namespace jgg::device

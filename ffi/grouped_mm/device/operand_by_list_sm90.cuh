// The kernel of products of which one operand comes by list: rows of L in mm, lines of k of R in
// wgrad. TMA copies boxes, not rows that lie anywhere. So the warp that schedules and the warp that
// copies gather them as well, in pieces of 16 bytes, into the chunks that TMA would have filled.
//
// Pairs of blocks share the operand that TMA copies. In mm they have tiles of 128 rows and 256
// columns, one above the other, which share R; each gathers its own rows. In wgrad they have tiles
// side by side, which share L; each gathers its own 128 columns.
//
// A gathered stage takes longer to fill than one that TMA copies, however few pieces it has, and
// shared memory holds no more than four. So products take up to 1.5 times as long. A list pays only
// where a copy of the rows takes longer than that: see docs/lab.
//
// rows_by_list_sm90.cuh says how pieces become visible to WGMMA. Its loader stays another one: its
// rows' places lie in shared memory, since the store needs them too, and two warps gather that do
// nothing else. Here lanes keep places in registers, for all slices of a tile.
#pragma once

#include <cstdint>

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/device/backward_sm90.cuh"
#include "grouped_mm/device/gemm_sm90.cuh"

namespace jgg::device {

constexpr int kGatherWarps = 2;  // those that gather

// A row of the operand, or -1.
__device__ inline int RowByList(const RowList& rows, int at) {
  const int row = rows.list[at];
  return static_cast<uint32_t>(row) < static_cast<uint32_t>(rows.count) ? row : -1;
}

// A row's slice is 8 pieces, for as many lanes, so a warp copies 4 rows at a time.
__device__ inline int PieceOfLane() { return threadIdx.x % 8; }
__device__ inline int RowOfLane() { return threadIdx.x % 32 / 8; }

// A lane's place in a warp's first 4 rows. Its piece is swizzled by the row.
__device__ inline uint32_t PlaceOfLane(int warp) {
  const int row = 4 * warp + RowOfLane();
  return row * 128 + (PieceOfLane() ^ row) * 16;
}

// Gathers half of L's rows: of every 8, a warp has 4. Lanes keep in registers where rows are, for
// all slices of a tile, and each keeps some for the others. Rows behind the tile's last are not
// gathered. Their products are not stored.
template <typename Config, typename Argument>
class RowsOfL {
  static constexpr int kShare = Config::kRows / kGatherWarps, kEach = kShare / 32;

 public:
  __device__ RowsOfL(const Argument& by_list, typename Config::SharedMemory& memory, int warp)
      : by_list_(by_list), to_(SharedAddress(memory.l) + PlaceOfLane(warp)), warp_(warp) {}

  __device__ void Begin(const Work& work) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      // Step s of the warp copies rows 8 s + 4 warp + 0 ... 3. Lane l has number l % 4 of step 8 i
      // + l / 4.
      const int lane = threadIdx.x % 32, row = 8 * (8 * i + lane / 4) + 4 * warp_ + lane % 4;
      rows_[i] = row < work.rows ? RowByList(by_list_.list, work.l_row + row) : -1;
    }
  }

  __device__ void Gather(const Work& work, int turn, int stage) const {
    const int k = work.Slice(turn) * kSliceSm90 + PieceOfLane() * 8, k_end = by_list_.gemm.k;
    const uint32_t line = 2u * k_end;  // bytes: two for each of up to 2^31 k
    const char* from = static_cast<const char*>(by_list_.data) + 2 * static_cast<int64_t>(k);
    const uint32_t to = to_ + stage * sizeof(typename Config::SharedMemory::L);
    const bool inside = k < k_end;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (64 * i >= work.rows) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = __shfl_sync(~0u, rows_[i], 4 * j + RowOfLane());
        CopyPiece(from + static_cast<uint64_t>(static_cast<uint32_t>(row)) * line,
                  to + (8 * i + j) * 8 * 128, inside && row >= 0 ? 16 : 0);
      }
    }
  }

 private:
  const Argument& by_list_;
  const uint32_t to_;
  const int warp_;
  int rows_[kEach];
};

// Gathers half of R's lines of k, with all columns: of every 8, a warp has 4. Lines outside of the
// segment become zeros. The list is read one slice ahead.
template <typename Config, typename Argument>
class LinesOfR {
  static constexpr int kSteps = kSliceSm90 / 8, kChunks = Config::kChunksR;
  static_assert(kSteps * 4 == 32);  // a line for each lane

 public:
  __device__ LinesOfR(const Argument& by_list, typename Config::SharedMemory& memory, int warp)
      : by_list_(by_list), to_(SharedAddress(memory.r) + PlaceOfLane(warp)), warp_(warp) {}

  __device__ void Begin(const Work& work) { next_ = Line(work, 0); }

  __device__ void Gather(const Work& work, int turn, int stage) {
    const int row_of_lane = next_, n = by_list_.gemm.n;
    if (turn + 1 < work.slices) next_ = Line(work, turn + 1);
    const int column = work.out_column + PieceOfLane() * 8;
    const char* from = static_cast<const char*>(by_list_.data) + 2 * static_cast<int64_t>(column);
    const uint32_t to = to_ + stage * sizeof(typename Config::SharedMemory::R);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int row = __shfl_sync(~0u, row_of_lane, 4 * j + RowOfLane());
      const char* line = from + static_cast<uint64_t>(static_cast<uint32_t>(row)) * (2u * n);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        CopyPiece(line + 128 * chunk, to + chunk * Config::kChunkBytesR + j * 8 * 128,
                  row >= 0 && column + 64 * chunk < n ? 16 : 0);
      }
    }
  }

 private:
  // Where this lane's line of a slice is.
  __device__ int Line(const Work& work, int turn) const {
    const int lane = threadIdx.x % 32;
    const int t = work.Slice(turn) * kSliceSm90 + 8 * (lane / 4) + 4 * warp_ + lane % 4;
    const int end = (work.slices - 1) * kSliceSm90 + work.last;
    return t >= work.first && t < end ? RowByList(by_list_.list, work.r_k + t) : -1;
  }

  const Argument& by_list_;
  const uint32_t to_;
  const int warp_;
  int next_;
};

template <typename Config, typename Argument>
using GathererSm90 = std::conditional_t<Config::kByList == ByList::kRowsOfL,
                                        RowsOfL<Config, Argument>, LinesOfR<Config, Argument>>;

// A warp gathers its share of a tile's slices. Its first lane calls copy(turn, stage) for each
// slice, and copy_more(chunk, stage) for what follows the slices.
template <typename Config, typename Gatherer, typename Copy, typename CopyMore>
__device__ void GatherTile(Gatherer& gatherer, typename Config::SharedMemory& memory,
                           const Work& work, Place<Config::kStages>& at, Copy copy,
                           CopyMore copy_more) {
  if (work.slices > 0) gatherer.Begin(work);
#pragma unroll 1
  for (int turn = 0; turn < work.slices; ++turn) {
    Wait(&memory.empty[at.index], at.parity ^ 1);
    if (threadIdx.x % 32 == 0) copy(turn, at.index);
    __syncwarp();
    gatherer.Gather(work, turn, at.index);
    ArriveCopied(&memory.full[at.index]);
    at.Next();
  }
  if constexpr (Config::kGoesBack) {
    if (work.slices == 0) return;
#pragma unroll 1
    for (int chunk = 0; chunk < kBackwardStages<Config>; ++chunk) {
      Wait(&memory.empty[at.index], at.parity ^ 1);
      if (threadIdx.x % 32 == 0) copy_more(chunk, at.index);
      __syncwarp();
      ArriveCopied(&memory.full[at.index]);
      at.Next();
    }
  }
}

// The warp that copies.
template <typename Config, typename Argument>
__device__ void CopyAndGatherWarp(const Argument& by_list, typename Config::SharedMemory& memory,
                                  int block) {
  const Copier<Config> copier{by_list.gemm, block};
  GathererSm90<Config, Argument> gatherer(by_list, memory, 1);
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    const int chunks = copier.Chunks(work);
    const bool shares = copier.Shares(work);
    GatherTile<Config>(
        gatherer, memory, work, at,
        [&](int turn, int stage) { copier.CopySlice(memory, work, turn, chunks, shares, stage); },
        [&](int chunk, int stage) {
          if constexpr (Config::kGoesBack) {
            CopyBackward<Config>(by_list, memory, work, chunk, stage);
          }
        });
  });
  WaitCopied();  // nothing says that copies outlive the thread that began them
}

// The warp that schedules. It puts the next tile into the ring of work before it gathers this one.
template <typename Config, typename Argument>
__device__ void ScheduleAndGatherWarp(const Argument& by_list,
                                      typename Config::SharedMemory& memory, int block) {
  GathererSm90<Config, Argument> gatherer(by_list, memory, 0);
  Place<Config::kStages> at;
  Place<Config::kWorks> filled, read;
  WithSchedule<Config>(by_list.gemm, memory, block, [&](auto& schedule) {
    bool more = true;
    const auto fill = [&] {
      const Work work = schedule.Next();
      Wait(&memory.work_empty[filled.index], filled.parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        memory.works[filled.index] = work;
        Arrive(&memory.work_full[filled.index]);
      }
      __syncwarp();
      filled.Next();
      more = work.rows > 0;
    };
    fill();
    while (true) {
      if (more) fill();
      const Work work = memory.works[read.index];
      __syncwarp();
      ArriveFor(&memory.work_empty[read.index + ZeroAfter(work.OfEachLoad())]);
      read.Next();
      if (work.rows == 0) break;
      GatherTile<Config>(gatherer, memory, work, at, [](int, int) {}, [](int, int) {});
    }
  });
  WaitCopied();
}

template <typename Config, typename Argument>
__global__ void __launch_bounds__(Config::kThreads, 1)
    OperandByListSm90Kernel(const __grid_constant__ Argument by_list) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const GemmSm90& gemm = by_list.gemm;
  const int block = BlockInCluster(), warp = threadIdx.x / 32;
  if (threadIdx.x == 32) InitGemm<Config>(gemm, memory);
  if (warp == 3) PrefetchSizes(gemm);
  if constexpr (Config::kRaggedK) {
    if (gemm.order.ranks) RankMatrices<Config>(gemm, memory.ranked);
  }
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 0) {
      ScheduleAndGatherWarp<Config>(by_list, memory, block);
    } else if (warp == 1) {
      CopyAndGatherWarp<Config>(by_list, memory, block);
    } else if constexpr (!Config::kGoesBack) {
      OtherWarp<Config>(gemm, memory, warp);
    } else if (warp == 3) {
      StoreBackwardWarp<Config>(by_list, memory);
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    if constexpr (Config::kGoesBack) {
      MultiplyBackwardWarpgroup<Config>(by_list, memory, warp / 4 - 1);
    } else {
      MultiplyWarpgroup<Config>(gemm, memory, warp / 4 - 1);
    }
  }
  ClusterSync();
}

}  // namespace jgg::device

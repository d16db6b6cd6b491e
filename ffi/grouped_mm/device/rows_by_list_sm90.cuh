// The kernel of mm with rows by list. As gemm_sm90.cuh, but TMA cannot copy rows that lie anywhere:
//   warp 0        with each tile, puts into the ring of work where its rows are
//   warps 2 and 3 gather L, in pieces of 16 bytes, into the chunks that TMA would have filled
// and the warpgroups store each row where it belongs.
//
// `cp.async` writes the pieces through the generic proxy, and WGMMA reads them through the async
// proxy. They become visible in three steps. A thread arrives at the stage's "full" barrier when
// its pieces have been written, and not before (`cp.async.mbarrier.arrive.noinc`). A thread that
// has waited there comes after all pieces. Its proxy fence (Products::MultiplySlices) orders them
// before the products that it begins. The fence has to lie between the completed write and the
// read, so the thread that reads has it. A thread that gathers would have to wait for its pieces
// before it fences, and would hold up the next ones. The other way round needs no fence, because a
// warpgroup has waited for its products before a stage is free.
#pragma once

#include <cstdint>

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/device/gemm_sm90.cuh"

namespace jgg::device {

constexpr int kGatherWarps = 2;

// The row that the list names for t, -1 for none. Without a list, t itself.
__device__ inline int RowAt(const RowList& rows, int t) {
  if (rows.list == nullptr) return t;
  const int row = rows.list[t];
  return row >= 0 && row < rows.count ? row : -1;
}

// The scheduling warp writes down where the rows of a tile are. Behind the last, up to a multiple
// of 32, there are none.
template <int kRows>
__device__ void FillRows(const RowsByListSm90& by_list, const Work& work, TileRows<kRows>& to) {
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < (work.rows + 31) / 32 * 32; i += 32) {
    const bool real = i < work.rows;
    to.x[i] = !real ? -1 : work.weight < 0 ? 0 : RowAt(by_list.x_list, work.l_row + i);
    to.y[i] = real ? RowAt(by_list.y_list, work.out_row + i) : -1;
  }
}

// As ForEachWork, but calls f(work, rows), and keeps both in the ring until f has returned.
template <typename Config, typename Function>
__device__ void ForEachRows(typename Config::SharedMemory& memory, Function f) {
  Place<Config::kWorks> at;
  while (true) {
    Wait(&memory.work_full[at.index], at.parity);
    const Work work = memory.works[at.index];
    if (work.rows > 0) f(work, memory.rows[at.index]);
    __syncwarp();
    ArriveFor(&memory.work_empty[at.index]);
    at.Next();
    if (work.rows == 0) return;
  }
}

// One of kGatherWarps. A row's slice is 8 pieces, and a lane copies one, so a warp copies 4 rows at
// a time. Pieces behind K, and of rows that are none, become zeros. Chunks behind the tile's last
// row are multiplied as they are, because rows do not mix.
template <typename Config>
__device__ void GatherWarp(const RowsByListSm90& by_list, typename Config::SharedMemory& memory,
                           int warp) {
  static_assert(kGatherWarps == 2 && Config::kRows % 32 == 0);
  const int lane = threadIdx.x % 32;
  const int piece = lane % 8, first = warp * 4 + lane / 8;  // of every 8 rows
  const int k_end = by_list.gemm.k;
  const uint32_t line = 2u * k_end;  // bytes: two for each of up to 2^31 k
  Place<Config::kStages> at;
  ForEachRows<Config>(memory, [&](const Work& work, const TileRows<Config::kRows>& rows) {
#pragma unroll 1
    for (int turn = 0; turn < work.slices; ++turn) {
      const int k = work.Slice(turn) * kSliceSm90 + piece * 8;
      const char* from = static_cast<const char*>(by_list.x) + 2 * static_cast<int64_t>(k);
      char* to = memory.l[at.index][0] + first * 128 + (piece ^ first) * 16;  // swizzled by the row
      Wait(&memory.empty[at.index], at.parity ^ 1);
#pragma unroll 1
      for (int begin = 0; begin < work.rows; begin += 32) {
        int row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) row[i] = rows.x[begin + first + 8 * i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          CopyPiece(from + static_cast<uint64_t>(static_cast<uint32_t>(row[i])) * line,
                    to + i * 1024, row[i] >= 0 && k < k_end ? 16 : 0);
        }
        to += 32 * 128;
      }
      ArriveCopied(&memory.full[at.index]);
      at.Next();
    }
  });
  WaitCopied();  // nothing says that copies outlive the thread that began them
}

// One of the two warpgroups that multiply.
template <typename Config>
__device__ void MultiplyRowsWarpgroup(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                                      int group) {
  using P = Products<Config>;
  typename Config::Epilogue epilogue(gemm, memory.staged[group], 1 + group);
  Place<Config::kStages> at, cleared;
  ForEachRows<Config>(memory, [&](const Work& work, const TileRows<Config::kRows>& rows) {
    typename P::Sums sums;
    P::MultiplyTile(memory, work, false, group, at, cleared, sums);
    epilogue.SetRows(rows.x, rows.y);
    if constexpr (Config::kBlocks == 1) {
      epilogue.Store(work, 64 * group, sums[0]);
    } else {
      epilogue.StoreGated(work, 64 * group, sums[0], sums[1]);
    }
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    RowsByListSm90Kernel(const __grid_constant__ RowsByListSm90 by_list) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const GemmSm90& gemm = by_list.gemm;
  if (threadIdx.x == 0) {
    InitRings<Config>(memory, 1 + 32 * kGatherWarps, 1 + kGatherWarps, 32);
    Prefetch(&gemm.r_map);
  }
  const int warp = threadIdx.x / 32;
  if (warp == 3) PrefetchSizes(gemm);
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, 0, [&](const Work& work, int place) {
        FillRows(by_list, work, memory.rows[place]);
      });
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) CopyThread<Config>(gemm, memory, 0);
      __syncwarp();
    } else {
      GatherWarp<Config>(by_list, memory, warp - 2);
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyRowsWarpgroup<Config>(gemm, memory, warp / 4 - 1);
  }
}

}  // namespace jgg::device

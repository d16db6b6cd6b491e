// One thread block computes where groups begin, which conversions of grouped rows need first.
#pragma once

#include "nvfp4/device/groups.cuh"

namespace jgg::nvfp4::device {

// Each group's first row and its first tile of padded rows, (G + 1,). All threads of a block of
// kScanThreads call this, and then need a barrier.
__device__ inline void FindStarts(const GroupScan& scan, int32_t* starts, int32_t* tiles) {
  __shared__ int64_t row_sums[kScanThreads], tile_sums[kScanThreads];
  const int thread = threadIdx.x;
  row_sums[thread] = SumSizes(scan, thread);
  __syncthreads();
  const int64_t before = SumBefore(scan, row_sums, thread);
  tile_sums[thread] = SumTiles(scan, thread, before);
  __syncthreads();
  int64_t tile = SumBefore(scan, tile_sums, thread);
  VisitGroups(scan, thread, before, [&](int g, int32_t start, int32_t, int64_t count) {
    starts[g] = start;
    tiles[g] = static_cast<int32_t>(tile);
    tile += count;
  });
  if (thread == kScanThreads - 1) {
    const int64_t end = before + row_sums[thread];
    starts[scan.groups] = static_cast<int32_t>(end < scan.tokens ? end : scan.tokens);
    tiles[scan.groups] = static_cast<int32_t>(tile);
  }
}

}  // namespace jgg::nvfp4::device

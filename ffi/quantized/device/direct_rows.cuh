// Which rows a block of direct_sm90.cuh has. Tested on the host, tests/lib/direct_rows.cc.
#pragma once

#include <cstdint>

#include "grouped_mm/segments.h"

namespace jgg::device {

constexpr int kDirectRows = 8;  // of a block: the instruction's N

// The rows of a block.
struct DirectRows {
  int first;   // of x and of the result
  int loaded;  // rows that are multiplied, at most kDirectRows
  int inside;  // of them, rows of the group; others become zeros
  int weight;  // -1: of no group
};

// The block of row `row`, by a warp. Without rows where a row before it has that block.
__device__ inline DirectRows FindDirectRows(const Metadata& metadata, int groups, int rows,
                                            int row) {
  const int lane = threadIdx.x % 32, count = static_cast<int>(metadata.count);
  const int offset = metadata.offset == nullptr ? 0 : *metadata.offset;
  const auto size_of = [&](int i) { return i < count ? min(max(metadata.data[i], 0), rows) : 0; };
  int before = 0;  // rows of earlier groups
#pragma unroll 1
  for (int window = 0; window < count && before <= row; window += 128) {
    int sizes[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += sizes[i] = size_of(window + 4 * lane + i);
    int start = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int earlier = __shfl_up_sync(~0u, start, distance);
      if (lane >= distance) start += earlier;
    }
    const int all = __shfl_sync(~0u, start, 31);
    start += before - sum;
    int group = -1, begin = 0, end = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row >= start && row - start < sizes[i]) {
        group = window + 4 * lane + i, begin = start, end = min(start + sizes[i], rows);
      }
      start += sizes[i];
    }
    const unsigned found = __ballot_sync(~0u, group >= 0);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      const uint32_t weight = __shfl_sync(~0u, group, owner) - static_cast<uint32_t>(offset);
      begin = __shfl_sync(~0u, begin, owner), end = __shfl_sync(~0u, end, owner);
      if (weight >= static_cast<uint32_t>(groups)) break;
      const int some = (row - begin) % kDirectRows == 0 ? min(kDirectRows, end - row) : 0;
      return {row, some, some, static_cast<int>(weight)};
    }
    before += all;
  }
  return {row, 1, 0, -1};
}

}  // namespace jgg::device

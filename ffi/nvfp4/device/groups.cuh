// The threads of one block compute from group sizes where each group's tokens and tiles begin; on
// the host they run one after another. The caller puts barriers between the steps.
#pragma once

#include "nvfp4/layout.h"

namespace jgg::nvfp4::device {

inline constexpr int kScanThreads = 256;

// Each thread has a run of groups.
struct GroupScan {
  const int32_t* sizes;
  int32_t groups, tokens, unit;
  int64_t most_tiles;

  JGG_HOST_DEVICE int begin(int thread) const {
    const int64_t run = CeilDiv(groups, kScanThreads);
    return static_cast<int>(run * thread < groups ? run * thread : groups);
  }
  // How many groups the threads before this one have.
  JGG_HOST_DEVICE int owners_before(int thread) const {
    if (groups == 0) return 0;
    const auto owners = static_cast<int>(CeilDiv(groups, CeilDiv(groups, kScanThreads)));
    return thread < owners ? thread : owners;
  }
  // A negative size counts as 0, and none needs to be larger than all tokens.
  JGG_HOST_DEVICE int64_t size(int group) const {
    const int32_t size = sizes[group];
    return size < 0 ? 0 : size < tokens ? size : tokens;
  }
};

JGG_HOST_DEVICE int64_t SumBefore(const GroupScan& scan, const int64_t* sums, int thread) {
  int64_t sum = 0;
  for (int before = 0; before < scan.owners_before(thread); ++before) sum += sums[before];
  return sum;
}

// Step 1: the sum of a thread's sizes.
JGG_HOST_DEVICE int64_t SumSizes(const GroupScan& scan, int thread) {
  int64_t sum = 0;
  for (int g = scan.begin(thread); g < scan.begin(thread + 1); ++g) sum += scan.size(g);
  return sum;
}

// Walks a thread's groups: visit(group, start, size, tiles of its own).
template <typename Visit>
JGG_HOST_DEVICE void VisitGroups(const GroupScan& scan, int thread, int64_t tokens_before,
                                 const Visit& visit) {
  int64_t sum = tokens_before;
  for (int g = scan.begin(thread); g < scan.begin(thread + 1); ++g) {
    const int64_t start = sum < scan.tokens ? sum : scan.tokens;
    sum += scan.size(g);
    const int64_t size = (sum < scan.tokens ? sum : scan.tokens) - start;
    visit(g, static_cast<int32_t>(start), static_cast<int32_t>(size), CeilDiv(size, scan.unit));
  }
}

// Step 2: the sum of its groups' tiles.
JGG_HOST_DEVICE int64_t SumTiles(const GroupScan& scan, int thread, int64_t tokens_before) {
  int64_t sum = 0;
  VisitGroups(scan, thread, tokens_before,
              [&](int, int32_t, int32_t, int64_t tiles) { sum += tiles; });
  return sum;
}

// Step 3: write (G + 1,) starts and tiles, and each group's problem: store(group, problem).
template <typename Store>
JGG_HOST_DEVICE void WriteGroups(const Product& product, const GroupScan& scan, int thread,
                                 int64_t tokens_before, int64_t tiles_before, int32_t* starts,
                                 int32_t* tiles, const Store& store) {
  int64_t tile = tiles_before;
  // NOTE: sizes other than those of the operands may ask for more tiles than there are.
  const auto cut = [&](int64_t value) { return value < scan.most_tiles ? value : scan.most_tiles; };
  int64_t end = tokens_before < scan.tokens ? tokens_before : scan.tokens;
  VisitGroups(scan, thread, tokens_before,
              [&](int g, int32_t start, int32_t size, int64_t own_tiles) {
                const int64_t first = cut(tile), count = cut(tile + own_tiles) - first;
                starts[g] = start;
                tiles[g] = static_cast<int32_t>(first);
                store(g, MakeGroupProblem(product, g, start, size, first, count));
                tile += own_tiles;
                end = start + size;
              });
  if (thread == kScanThreads - 1) {
    starts[scan.groups] = static_cast<int32_t>(end);
    tiles[scan.groups] = static_cast<int32_t>(cut(tile));
  }
}

// The group that has `tile`: the last one that begins at or before it. The group has tiles if
// `tile` is below tiles[groups].
JGG_HOST_DEVICE int GroupOfTile(const int32_t* tiles, int groups, int tile) {
  int low = 0, high = groups;
  while (low + 1 < high) {
    const int middle = low + (high - low) / 2;
    if (tiles[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace jgg::nvfp4::device

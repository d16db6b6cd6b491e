// One block finds from a call's metadata each product of Blackwell's kernels, and the rows of the
// result that none of them reaches.
#pragma once

#include <cstdint>

#include "grouped_mm/device/scan.cuh"
#include "grouped_mm/device/segments.cuh"
#include "grouped_mm/layout_sm100.h"

namespace jgg::device {

inline constexpr int kGroupThreads = 256;

// Entry `index` as a segment, which is empty where it has no matrix. `rows_before` are those of the
// groups before this window of sizes; all threads of the block call this together.
__device__ inline Segment ReadEntry(const sm100::Product& product, const Metadata& metadata,
                                    int64_t index, int64_t* rows_before, int64_t* scratch) {
  const bool exists = index < metadata.count;
  const int rows_x = static_cast<int>(product.rows_x);
  if (metadata.kind != MetadataKind::kSizes) {
    if (!exists) return Segment{};
    return ReadSegment(metadata, rows_x, static_cast<int>(product.rows_y), product.weights, index);
  }
  // A negative size counts as 0, and none needs to be larger than all rows.
  const int64_t size = exists ? min(max(metadata.data[index], 0), rows_x) : 0;
  int64_t all;
  const int64_t before =
      *rows_before +
      ExclusiveScan<kGroupThreads>(
          size, int64_t{0}, [](int64_t a, int64_t b) { return a + b; }, scratch, &all);
  *rows_before += all;
  const int64_t first = metadata.offset == nullptr ? 0 : *metadata.offset;
  const int64_t weight = index - first;
  if (!exists || weight < 0 || weight >= product.weights) return Segment{};
  const int start = static_cast<int>(min(before, product.rows_x));
  const int end = static_cast<int>(min(before + size, product.rows_x));
  return Segment{start, start, end - start, static_cast<int>(weight)};
}

// store(p, problem) for each of `problems`; Gaps, and how many, of an mm whose segments' rows in
// the result ascend.
template <typename Store>
__device__ void FindGroups(const sm100::Product& product, const Metadata& metadata,
                           int64_t problems, sm100::Gap* gaps, int* gap_count, Store store) {
  __shared__ int64_t scratch[kGroupThreads / 32];
  __shared__ int small_scratch[kGroupThreads / 32];
  const int thread = threadIdx.x;
  // Those that no entry names.
  for (int64_t p = thread; p < problems; p += kGroupThreads) store(p, sm100::GroupProblem{});
  __syncthreads();
  int64_t rows_before = 0;
  int covered = 0, gaps_before = 0, all;
  for (int64_t base = 0; base < metadata.count; base += kGroupThreads) {
    const int64_t index = base + thread;
    const Segment segment = ReadEntry(product, metadata, index, &rows_before, scratch);
    const bool whole = segment.length > 0;
    if (whole) {
      // A matrix of the result has an entry of its own, whatever that says.
      const bool by_index = metadata.kind != MetadataKind::kSizes;
      const int matrix = by_index && product.wgrad ? static_cast<int>(index) : segment.weight;
      const int64_t p = by_index ? index : segment.weight;
      if (p < problems) store(p, sm100::MakeProblem(product, segment, matrix));
    }
    if (product.wgrad) continue;
    const int before =
        max(covered, ExclusiveScan<kGroupThreads>(
                         whole ? segment.y_start + segment.length : 0, 0,
                         [](int a, int b) { return max(a, b); }, small_scratch, &all));
    covered = max(covered, all);
    const bool gap = whole && segment.y_start > before;
    const int place =
        gaps_before + ExclusiveScan<kGroupThreads>(
                          gap ? 1 : 0, 0, [](int a, int b) { return a + b; }, small_scratch, &all);
    gaps_before += all;
    if (gap) gaps[place] = sm100::Gap{before, segment.y_start};
  }
  if (product.wgrad || thread != 0) return;
  const int rows = static_cast<int>(product.rows_y);
  if (covered < rows) gaps[gaps_before++] = sm100::Gap{covered, rows};
  *gap_count = gaps_before;
}

}  // namespace jgg::device

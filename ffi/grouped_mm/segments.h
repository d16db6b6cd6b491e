// Segments, and the forms in which grouping metadata reaches a handler.
#pragma once

#include <cstdint>

namespace jgg {

// `length` rows of x from x_start meet as many rows of y (mm: of the result) from y_start, and one
// weight. Upheld by whoever builds a table of these: 0 <= start, start + length <= rows, and
// length == 0 where the weight does not exist.
struct alignas(16) Segment {
  int32_t x_start, y_start, length, weight;
};

// The raw forms, all int32 on the device; jax_groupgemm/_core/segments.py is their definition.
enum class MetadataKind {
  kSizes,     // (count,) rows of consecutive groups; with `offset`, weights are some of them only
  kSpans,     // (count, 2) half-open row ranges; range s has weight s
  kSegments,  // (count, 4) Segment
};

struct Metadata {
  MetadataKind kind = MetadataKind::kSegments;
  const int32_t* data = nullptr;
  const int32_t* offset = nullptr;  // kSizes: the group that weight 0 is; null for 0
  int64_t count = 0;
  bool swapped = false;     // kSegments: the first two columns are (y_start, x_start)
  bool clears_rest = true;  // mm: rows of no segment become zeros, or they may hold anything

  // Whether entry i is for weight i, of so many.
  constexpr bool HasEntryOfEach(int64_t weights) const {
    return offset == nullptr && count == weights;
  }
  // ... and rows follow each other, so that only those behind the last group belong to none.
  constexpr bool HasSizeOfEach(int64_t weights) const {
    return kind == MetadataKind::kSizes && HasEntryOfEach(weights);
  }
  const Segment* table() const { return reinterpret_cast<const Segment*>(data); }
};

}  // namespace jgg

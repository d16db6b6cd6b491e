// Segments as kernels read them.
#pragma once

#include <cstdint>

#include "grouped_mm/segments.h"

namespace jgg::device {

// `start` in [0, rows]; whether `length` rows from there on exist.
__device__ inline bool Clamp(int rows, int length, int* start) {
  const bool exist =
      *start >= 0 && static_cast<uint32_t>(*start) + length <= static_cast<uint32_t>(rows);
  *start = min(max(*start, 0), rows);
  return exist;
}

// One segment of the forms that name their rows outright. Spans are clamped to x's rows; a segment
// that names rows or a weight that do not exist has no rows.
__device__ inline Segment ReadSegment(const Metadata& metadata, int rows_x, int rows_y,
                                      int64_t groups, int64_t index) {
  if (metadata.kind == MetadataKind::kSpans) {
    const int2 span = reinterpret_cast<const int2*>(metadata.data)[index];
    const int start = min(max(span.x, 0), rows_x), end = min(max(span.y, 0), rows_x);
    return Segment{start, start, max(end - start, 0), static_cast<int>(index)};
  }
  Segment segment = reinterpret_cast<const Segment*>(metadata.data)[index];
  if (metadata.swapped) {
    const int x_start = segment.x_start;
    segment.x_start = segment.y_start;
    segment.y_start = x_start;
  }
  const bool in_x = Clamp(rows_x, segment.length, &segment.x_start);
  const bool in_y = Clamp(rows_y, segment.length, &segment.y_start);
  const bool named = segment.weight >= 0 && segment.weight < groups;
  if (!in_x || !in_y || !named || segment.length < 0) segment.length = 0;
  return segment;
}

}  // namespace jgg::device

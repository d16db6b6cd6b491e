// Segments as kernels read them.
#pragma once

#include <cstdint>

#include "grouped_mm/segments.h"

namespace jgg::device {

// One segment of the forms that name their rows outright. Spans are clamped to `rows`; a segment
// whose weight is not one of `groups` has no rows.
__device__ inline Segment ReadSegment(const Metadata& metadata, int rows, int64_t groups,
                                      int64_t index) {
  if (metadata.kind == MetadataKind::kSpans) {
    const int2 span = reinterpret_cast<const int2*>(metadata.data)[index];
    const int start = min(max(span.x, 0), rows), end = min(max(span.y, 0), rows);
    return Segment{start, start, max(end - start, 0), static_cast<int>(index)};
  }
  Segment segment = reinterpret_cast<const Segment*>(metadata.data)[index];
  if (metadata.swapped) {
    const int x_start = segment.x_start;
    segment.x_start = segment.y_start;
    segment.y_start = x_start;
  }
  if (segment.weight < 0 || segment.weight >= groups) segment.length = 0;
  return segment;
}

}  // namespace jgg::device

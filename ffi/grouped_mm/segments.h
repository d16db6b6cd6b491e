// One row of the segment table: `length` rows of x from x_start meet as many rows of y (mm: of the
// result) from y_start, and one weight. Upheld by whoever builds the table: 0 <= start,
// start + length <= rows, and length == 0 where the weight does not exist.
#pragma once

#include <cstdint>

namespace jgg {

struct alignas(16) Segment {
  int32_t x_start, y_start, length, weight;
};

}  // namespace jgg

// How a kernel's threads find the global scales of their groups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized/quantize.h"

namespace jgg {

// From a thread's group to its next is a fixed number of groups.
struct GlobalScaleSteps {
  const float* data;  // null where there is none
  // Groups that share the first scale, and each of the others; how often the latter fit into a
  // step, and the groups that are left of it.
  int32_t first, per_scale, index_step, rest_step;
};

// For a kernel that begins at a group of `q`, and has fewer than 2^30.
inline GlobalScaleSteps MakeGlobalScaleSteps(const QuantizedArray& q, int64_t group, int64_t step) {
  if (q.global_scale == nullptr) return {};
  constexpr int64_t kMost = 1 << 30;
  const int64_t per_scale = q.elements / q.global_scales / q.group_size;
  const int64_t limited = std::min(per_scale, kMost);
  return {q.global_scale + group / per_scale,
          static_cast<int32_t>(std::min(per_scale - group % per_scale, kMost)),
          static_cast<int32_t>(limited), static_cast<int32_t>(step / limited),
          static_cast<int32_t>(step % limited)};
}

}  // namespace jgg

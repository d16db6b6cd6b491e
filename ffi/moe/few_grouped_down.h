// Arguments of the kernel in device/few_grouped_down_sm90.cuh.
#pragma once

#include <cstdint>

#include "moe/few_tokens.h"

namespace jgg {

// Quotients by a number that the host knows, of any n where n * divisor is below 2^32.
struct Divisor {
  uint32_t divisor, inverse;

  static constexpr Divisor Of(int64_t divisor) {
    return {static_cast<uint32_t>(divisor),
            static_cast<uint32_t>(((int64_t{1} << 32) + divisor - 1) / divisor)};
  }
};

struct FewGroupedDown {
  FewTokens experts;
  int most_groups, rows_shift;  // of a block; a group has up to 2^rows_shift pairs
  // Blocks; strips of a group; steps of a strip, a tile of k each, but as many as a warp has words
  // of at least.
  Divisor blocks, strips_each, steps_each;
};

}  // namespace jgg

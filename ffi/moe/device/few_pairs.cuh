// Pairs of token and expert, as the kernels of a few tokens' experts find them.
#pragma once

#include <cstdint>

#include "moe/few_tokens.h"
#include "moe/rules.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

// The expert, or -1 if it is not here.
__device__ inline int LocalExpert(const FewTokens& experts, int pair) {
  const uint32_t first = experts.expert_offset == nullptr ? 0 : *experts.expert_offset;
  const uint32_t local = static_cast<uint32_t>(experts.expert_index[pair]) - first;
  return local < static_cast<uint32_t>(experts.experts) ? static_cast<int>(local) : -1;
}

// The pairs that a block of `up` has.
struct FewPairs {
  int expert, count;  // count 0: another block has them

  // pair_of: shared memory of 8 places. The block meets before it reads them.
  __device__ FewPairs(const FewTokens& experts, int own, int* pair_of) {
    static_assert(rules::kMostFewPairs == 64);
    const int lane = threadIdx.x % 32, last = experts.tokens * experts.k - 1;
    // Both at once, whether or not there are so many: one wait for memory.
    const int low_expert = LocalExpert(experts, min(lane, last));
    const int high_expert = LocalExpert(experts, min(lane + 32, last));
    expert = __shfl_sync(~0u, own < 32 ? low_expert : high_expert, own % 32);
    const bool low = lane <= last && low_expert == expert;
    const bool high = lane + 32 <= last && high_expert == expert;
    const uint64_t all =
        uint64_t{__ballot_sync(~0u, high)} << 32 | uint64_t{__ballot_sync(~0u, low)};
    const uint64_t later = ~uint64_t{0} << own, mine = all & later;
    const bool first = CountOf(all & ~later) % 8 == 0;
    count = expert < 0 || !first ? 0 : min(CountOf(mine), 8);
    const int pair = threadIdx.x;
    if (pair >= 64 || (mine >> pair & 1) == 0) return;
    const int row = CountOf(mine & ((uint64_t{1} << pair) - 1));
    if (row < count) pair_of[row] = pair;
  }

 private:
  __device__ static int CountOf(uint64_t bits) {
    return __popc(static_cast<uint32_t>(bits)) + __popc(static_cast<uint32_t>(bits >> 32));
  }
};

// Rows of x that a block of `up` has room for: a token's, or where tokens are more, a pair's.
JGG_HOST_DEVICE int FewRowsOfX(const FewTokens& experts) {
  return experts.tokens < 8 ? experts.tokens : 8;
}

}  // namespace jgg::device

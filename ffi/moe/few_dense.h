// The experts of a few tokens (few_tokens.h), with weights of bfloat16 or float16, as x is:
//   a[t, j] = activation(x[t] @ up[e] + up_bias[e])                    e = expert_index[t, j]
// out[t] = sum_j expert_weight[t, j] * (a[t, j] @ down[e] + down_bias[e])
// The kernels round the preactivation and a to that dtype. See device/few_dense_sm80.cuh.
#pragma once

#include "moe/few_tokens.h"

namespace jgg {

// The kernels' argument.
struct FewDense {
  FewTokens experts;  // of `w` its bias alone
  const void* w;      // up (experts, d, columns) or down (experts, f, d); or transposed
};

}  // namespace jgg

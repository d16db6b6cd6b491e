// The experts of a few tokens, with weights in layout "sm90" (quantized/gemm_sm90.h):
//   a[t, j] = activation(x[t] @ up[e] + up_bias[e])                    e = expert_index[t, j]
// out[t] = sum_j expert_weight[t, j] * (a[t, j] @ down[e] + down_bias[e]) The kernels round the
// preactivation and a to bfloat16, and out once. A pair whose expert is not here adds nothing.
// Nothing sorts the pairs: see device/few_tokens_sm90.cuh.
#pragma once

#include <cstdint>

#include "grouped_mm/mm.h"
#include "quantized/quantized.h"

namespace jgg {

struct FewTokensWeight {
  PackedCodesSm90 packed;
  const void* scales;
  GlobalScale global_scale;
  const void* bias;  // (experts, columns) or null
  DType bias_dtype;
};

// The kernels' argument.
struct FewTokens {
  const char* x;                 // (tokens, d) bfloat16
  char* a;                       // (tokens * k, f) bfloat16
  void* out;                     // (tokens, d)
  float* terms;                  // (tokens * k, d): what pairs add, where `down` is by groups
  const int32_t* expert_index;   // (tokens, k)
  const int32_t* expert_offset;  // the first expert that is here; null for 0
  const float* expert_weight;    // (tokens, k)
  int tokens, k, experts, d, f;
  DType out_dtype;
  Activation activation;
  FewTokensWeight w;  // up or down
};

}  // namespace jgg

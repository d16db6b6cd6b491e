// top_k: the experts of each token and their weights, of a router's logits; jax_groupgemm/_moe/
// top_k.py is the definition.
#pragma once

#include <cstdint>

namespace jgg {

struct TopKArgs {
  const void* logits;  // (tokens, experts), float32 or bfloat16
  const float* bias;   // (experts,), or null
  int32_t* expert;     // (tokens, k)
  float* weight;       // (tokens, k)
  int32_t tokens, experts, k;
  int32_t groups, top_groups;  // of neighbouring experts; a token meets some
  float scale;
  bool bfloat16;     // logits are
  bool sigmoid;      // or a softmax
  bool renormalize;  // weights of a token add up to scale
};

}  // namespace jgg

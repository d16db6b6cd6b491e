// nvfp4_grouped_wgrad by the Blackwell kernel.
#pragma once

#include "nvfp4/gemm_sm100.h"

namespace jgg {

// out[g] = alpha[g] * dy[:, columns g] @ x[:, columns g]^T + beta[g] * out[g]; T (contracted) is
// grouped. Tokens lie along the lines of dy and x, each group at the first multiple of 64 past the
// one before it, padded with zeros.
struct Nvfp4GroupedWgradArgs {
  nvfp4::Operand x, dy;  // (K, P), (N, P)
  const int32_t* sizes;  // (G,)
  const float* alpha;    // (G,)
  const float* beta;     // (G,), or null: out is only written
  void* out;             // (G, N, K) float32
  int64_t tokens, padded_tokens, n, k, groups;
  void* workspace;
  int64_t workspace_bytes;
};

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> nvfp4_grouped_wgrad_sm100_unsupported(const Nvfp4GroupedWgradArgs& args,
                                                                 int compute_capability);

cudaError_t nvfp4_grouped_wgrad_sm100(cudaStream_t stream, const Nvfp4GroupedWgradArgs& args);

}  // namespace jgg

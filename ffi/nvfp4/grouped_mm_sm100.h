// nvfp4_grouped_mm by the Blackwell kernel.
#pragma once

#include "nvfp4/gemm_sm100.h"

namespace jgg {

// out[t] = alpha[g] * x[t] @ w[g]^T; T (rows) is grouped. Rows of no group are zeros.
struct Nvfp4GroupedMmArgs {
  nvfp4::Operand x, w;   // (T, K), (G, N, K)
  const int32_t* sizes;  // (G,)
  const float* alpha;    // (G,)
  void* out;             // (T, N)
  DType out_dtype;       // bfloat16 or float32
  int64_t tokens, n, k, groups;
  void* workspace;
  int64_t workspace_bytes;
};

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> nvfp4_grouped_mm_sm100_unsupported(const Nvfp4GroupedMmArgs& args,
                                                              int compute_capability);

cudaError_t nvfp4_grouped_mm_sm100(cudaStream_t stream, const Nvfp4GroupedMmArgs& args);

}  // namespace jgg

// The Blackwell kernels of NVFP4 grouped products: block-scaled tensor instructions, by CUTLASS.
//
// out_g = alpha_g A_g B_g^T + beta_g out_g, as layout.h has it. The device computes shapes,
// addresses and layouts of all groups, in a workspace that the caller gives.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "common/dtype.h"
#include "nvfp4/layout.h"

namespace jgg::nvfp4 {

// Codes, two in a byte, and their E4M3 scales, line by line.
struct Operand {
  const void* codes;
  const void* scales;
};

struct GemmSm100 {
  Product product;
  DType out_dtype;  // bfloat16 or float32
  const int32_t* sizes;
  Operand a, b;
  void* out;
  const float* alpha;           // (G,)
  const float* beta = nullptr;  // (G,), or null: out is only written
  void* workspace;
  int64_t workspace_bytes;
};

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> GemmSm100Problem(const GemmSm100& gemm, int compute_capability);

cudaError_t LaunchGemmSm100(cudaStream_t stream, const GemmSm100& gemm);

// Launches all kernels of a call. `base` is the workspace, aligned.
cudaError_t PrepareGroups(cudaStream_t stream, const GemmSm100& gemm, const Workspace& at,
                          uint8_t* base);

// Instantiated in gemm_sm100.cu.
template <DType kOut>
cudaError_t MultiplyGroups(cudaStream_t stream, const GemmSm100& gemm, const Workspace& at,
                           uint8_t* base);

}  // namespace jgg::nvfp4

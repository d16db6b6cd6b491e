// The Blackwell kernels of mm and wgrad: tcgen05.mma by CUTLASS, bf16 and f16, float32 sums. The
// device computes shapes and addresses of all products, in a workspace that the caller gives.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "grouped_mm/layout_sm100.h"

namespace jgg {

struct GemmSm100 {
  sm100::Product product;
  DType dtype, out_dtype;  // of A and B; the result has it too, or is float32
  Metadata metadata;
  const void* a;
  const void* b;
  void* out;
  void* workspace;
  int64_t workspace_bytes;

  int64_t Problems() const { return sm100::MostProblems(product, metadata.kind, metadata.count); }
};

// The part of a call that mm and wgrad have alike: MmArgs or WgradArgs.
template <typename Args>
GemmSm100 GemmOf(const Args& args) {
  GemmSm100 gemm{};
  gemm.product.rows_x = args.rows_x;
  gemm.product.rows_y = args.rows_y;
  gemm.product.weights = args.groups;
  gemm.product.in_bytes = Size(args.dtype);
  gemm.product.out_bytes = Size(args.out_dtype);
  gemm.dtype = args.dtype;
  gemm.out_dtype = args.out_dtype;
  gemm.metadata = args.metadata;
  gemm.a = args.x;
  gemm.out = args.out;
  gemm.workspace = args.workspace;
  gemm.workspace_bytes = args.workspace_bytes;
  return gemm;
}

// Why no kernel takes operands and results of these dtypes.
template <typename Args>
std::optional<std::string> DTypesProblemSm100(const Args& args) {
  if (args.planes > 1 || args.dtype == DType::kF32) return "operands are float32";
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kF32) {
    return "the result is neither of the operands' dtype nor float32";
  }
  return std::nullopt;
}

// Whether TMA takes these addresses.
inline bool AlignedSm100(std::initializer_list<const void*> addresses) {
  for (const void* address : addresses) {
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
  }
  return true;
}

// Why no kernel takes a call of these operands; nothing where one does.
std::optional<std::string> GemmSm100Problem(const GemmSm100& gemm, int compute_capability);

cudaError_t LaunchGemmSm100(cudaStream_t stream, const GemmSm100& gemm);

// Zeros in the rows and matrices of the result that no product writes. `base` is the workspace,
// aligned, in which groups are known.
cudaError_t ZeroRestSm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                          uint8_t* base);

// The kernels that run before the product.
cudaError_t PrepareSm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                         uint8_t* base);

// The product. Instantiated in gemm_sm100.cu. Operands are contiguous along k, or along
// rows and columns.
template <typename Element, typename Out, bool kAKMajor, bool kBKMajor>
cudaError_t MultiplySm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                          uint8_t* base);

}  // namespace jgg

// mm: out[y_start_s + i] = x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
#include "grouped_mm/mm_sm100.h"

#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/shapes.h"

namespace jgg {

static GemmSm100 MakeGemm(const MmArgs& args) {
  GemmSm100 gemm{};
  sm100::Product& product = gemm.product;
  product.rows_x = args.rows_x;
  product.rows_y = args.rows_y;
  product.weights = args.groups;
  product.n = args.n;
  product.k = args.k;
  product.k_major = args.strides.w_k == 1;
  product.in_bytes = Size(args.dtype);
  product.out_bytes = Size(args.out_dtype);
  gemm.dtype = args.dtype;
  gemm.out_dtype = args.out_dtype;
  gemm.metadata = args.metadata;
  gemm.a = args.x;
  gemm.b = args.w;
  gemm.out = args.out;
  gemm.workspace = args.workspace;
  gemm.workspace_bytes = args.workspace_bytes;
  return gemm;
}

std::optional<std::string> mm_sm100_unsupported(const MmArgs& args, int compute_capability) {
  if (args.planes > 1 || args.dtype == DType::kF32) return "operands are float32";
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kF32) {
    return "the result is neither of the operands' dtype nor float32";
  }
  if (args.epilogue.Any() || args.epilogue.HasPreactivation()) return "it has no options";
  if (auto reason = rules::MmSm100Problem(DescribeShape(args))) return reason;
  return GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t mm_sm100(cudaStream_t stream, const MmArgs& args) {
  return LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

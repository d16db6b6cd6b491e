// wgrad: out[weight_s] = x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
#include "grouped_mm/wgrad_sm100.h"

#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/shapes.h"

namespace jgg {

static GemmSm100 MakeGemm(const WgradArgs& args) {
  GemmSm100 gemm{};
  sm100::Product& product = gemm.product;
  product.wgrad = true;
  product.rows_x = args.rows_x;
  product.rows_y = args.rows_y;
  product.weights = args.groups;
  product.m = args.a;
  product.n = args.b;
  product.in_bytes = Size(args.dtype);
  product.out_bytes = Size(args.out_dtype);
  gemm.dtype = args.dtype;
  gemm.out_dtype = args.out_dtype;
  gemm.metadata = args.metadata;
  gemm.a = args.x;
  gemm.b = args.y;
  gemm.out = args.out;
  gemm.workspace = args.workspace;
  gemm.workspace_bytes = args.workspace_bytes;
  return gemm;
}

std::optional<std::string> wgrad_sm100_unsupported(const WgradArgs& args, int compute_capability) {
  if (args.planes > 1 || args.dtype == DType::kF32) return "operands are float32";
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kF32) {
    return "the result is neither of the operands' dtype nor float32";
  }
  if (auto reason = rules::WgradSm100Problem(DescribeShape(args))) return reason;
  return GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t wgrad_sm100(cudaStream_t stream, const WgradArgs& args) {
  return LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

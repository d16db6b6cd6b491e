// wgrad: out[weight_s] = x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
#include "grouped_mm/wgrad_sm100.h"

#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/shapes.h"

namespace jgg {

static GemmSm100 MakeGemm(const WgradArgs& args) {
  GemmSm100 gemm = GemmOf(args);
  gemm.product.wgrad = true;
  gemm.product.m = args.a;
  gemm.product.n = args.b;
  gemm.b = args.y;
  return gemm;
}

std::optional<std::string> wgrad_sm100_unsupported(const WgradArgs& args, int compute_capability) {
  if (auto reason = DTypesProblemSm100(args)) return reason;
  if (auto reason = rules::WgradSm100Problem(DescribeShape(args))) return reason;
  return GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t wgrad_sm100(cudaStream_t stream, const WgradArgs& args) {
  return LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

// mm: out[y_start_s + i] = x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
#include "grouped_mm/mm_sm100.h"

#include "grouped_mm/gemm_sm100.h"
#include "grouped_mm/shapes.h"

namespace jgg {

static GemmSm100 MakeGemm(const MmArgs& args) {
  GemmSm100 gemm = GemmOf(args);
  gemm.product.n = args.n;
  gemm.product.k = args.k;
  gemm.product.k_major = args.strides.w_k == 1;
  gemm.b = args.w;
  return gemm;
}

std::optional<std::string> mm_sm100_unsupported(const MmArgs& args, int compute_capability) {
  if (auto reason = DTypesProblemSm100(args)) return reason;
  if (args.epilogue.Any() || args.epilogue.HasPreactivation()) return "it has no options";
  if (auto reason = rules::MmSm100Problem(DescribeShape(args))) return reason;
  return GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t mm_sm100(cudaStream_t stream, const MmArgs& args) {
  return LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

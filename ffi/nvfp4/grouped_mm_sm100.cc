// nvfp4_grouped_mm: A is x, whose rows are grouped; B is w.
#include "nvfp4/grouped_mm_sm100.h"

#include "nvfp4/rules.h"

namespace jgg {

static nvfp4::GemmSm100 MakeGemm(const Nvfp4GroupedMmArgs& args) {
  nvfp4::GemmSm100 gemm{};
  gemm.product = nvfp4::GroupedMm(args.tokens, args.groups, args.n, args.k, Size(args.out_dtype));
  gemm.out_dtype = args.out_dtype;
  gemm.sizes = args.sizes;
  gemm.a = args.x;
  gemm.b = args.w;
  gemm.out = args.out;
  gemm.alpha = args.alpha;
  gemm.workspace = args.workspace;
  gemm.workspace_bytes = args.workspace_bytes;
  return gemm;
}

std::optional<std::string> nvfp4_grouped_mm_sm100_unsupported(const Nvfp4GroupedMmArgs& args,
                                                              int compute_capability) {
  return nvfp4::GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t nvfp4_grouped_mm_sm100(cudaStream_t stream, const Nvfp4GroupedMmArgs& args) {
  return nvfp4::LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

// nvfp4_grouped_wgrad: A is dy, B is x, and a group has some of the columns of both.
#include "nvfp4/grouped_wgrad_sm100.h"

#include "nvfp4/rules.h"

namespace jgg {

static nvfp4::GemmSm100 MakeGemm(const Nvfp4GroupedWgradArgs& args) {
  nvfp4::GemmSm100 gemm{};
  gemm.product = nvfp4::GroupedWgrad(args.tokens, args.padded_tokens, args.groups, args.n, args.k);
  gemm.out_dtype = DType::kF32;
  gemm.sizes = args.sizes;
  gemm.a = args.dy;
  gemm.b = args.x;
  gemm.out = args.out;
  gemm.alpha = args.alpha;
  gemm.beta = args.beta;
  gemm.workspace = args.workspace;
  gemm.workspace_bytes = args.workspace_bytes;
  return gemm;
}

std::optional<std::string> nvfp4_grouped_wgrad_sm100_unsupported(const Nvfp4GroupedWgradArgs& args,
                                                                 int compute_capability) {
  return nvfp4::GemmSm100Problem(MakeGemm(args), compute_capability);
}

cudaError_t nvfp4_grouped_wgrad_sm100(cudaStream_t stream, const Nvfp4GroupedWgradArgs& args) {
  return nvfp4::LaunchGemmSm100(stream, MakeGemm(args));
}

}  // namespace jgg

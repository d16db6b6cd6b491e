// The conditions of a call, and its launches.
#include "grouped_mm/gemm_sm100.h"

#include "common/arch.h"
#include "common/dispatch.h"
#include "common/sample.h"

namespace jgg {

std::optional<std::string> GemmSm100Problem(const GemmSm100& gemm, int compute_capability) {
  if (auto problem = NeedsSm100(compute_capability)) return problem;
  if (!AlignedSm100({gemm.a, gemm.b, gemm.out})) return "an operand is not 16-byte aligned";
  return std::nullopt;
}

#ifdef JGG_SM100
template <typename Element, typename Out>
static cudaError_t Multiply(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                            uint8_t* base) {
  if (gemm.product.wgrad) return MultiplySm100<Element, Out, false, false>(stream, gemm, at, base);
  return DispatchBool(gemm.product.k_major, [&](auto k_major) {
    return MultiplySm100<Element, Out, true, k_major.value>(stream, gemm, at, base);
  });
}
#endif

cudaError_t LaunchGemmSm100(cudaStream_t stream, const GemmSm100& gemm) {
#ifdef JGG_SM100
  const sm100::Workspace at(gemm.Problems(), gemm.metadata.count);
  if (gemm.workspace_bytes < at.bytes) return cudaErrorInvalidValue;
  uint8_t* base = sm100::Arena::Base(gemm.workspace);
  const auto multiply = [&](auto element) {
    using Element = decltype(element);
    if (cudaError_t error = PrepareSm100(stream, gemm, at, base)) return error;
    return gemm.out_dtype == DType::kF32 ? Multiply<Element, float>(stream, gemm, at, base)
                                         : Multiply<Element, Element>(stream, gemm, at, base);
  };
  if (gemm.dtype == DType::kBF16) return multiply(cutlass::bfloat16_t{});
  if constexpr (!kSample) return multiply(cutlass::half_t{});
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

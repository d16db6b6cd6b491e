// The conditions of a call, and its launches.
#include "nvfp4/gemm_sm100.h"

#include <initializer_list>

#include "common/arch.h"
#include "nvfp4/rules.h"

namespace jgg::nvfp4 {

std::optional<std::string> GemmSm100Problem(const GemmSm100& gemm, int compute_capability) {
  if (auto problem = NeedsSm100(compute_capability)) return problem;
  if (auto problem = ShapeProblem(gemm.product)) return problem;
  const void* out = gemm.out;
  for (const void* data : {gemm.a.codes, gemm.b.codes, gemm.a.scales, gemm.b.scales, out}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "an operand is not 16-byte aligned";
  }
  return std::nullopt;
}

cudaError_t LaunchGemmSm100(cudaStream_t stream, const GemmSm100& gemm) {
#ifdef JGG_SM100
  const Workspace at(gemm.product);
  if (gemm.workspace_bytes < at.bytes) return cudaErrorInvalidValue;
  uint8_t* base = sm100::Arena::Base(gemm.workspace);
  if (cudaError_t error = PrepareGroups(stream, gemm, at, base)) return error;
  if (gemm.out_dtype == DType::kBF16) return MultiplyGroups<DType::kBF16>(stream, gemm, at, base);
#ifndef JGG_SAMPLE
  return MultiplyGroups<DType::kF32>(stream, gemm, at, base);
#endif
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg::nvfp4

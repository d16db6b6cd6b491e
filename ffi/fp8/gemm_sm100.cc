// From run-time types to one of the instances of gemm_sm100.cu.
#include "fp8/gemm_sm100.h"

#include "common/sample.h"
#include "cutlass/numeric_types.h"

namespace jgg {

cudaError_t LaunchFp8GemmSm100(cudaStream_t stream, const Fp8GemmSm100& fp8) {
#ifdef JGG_SM100
  const GemmSm100& gemm = fp8.gemm;
  const sm100::ScaledWorkspace at(gemm.Problems(), gemm.metadata.count);
  if (gemm.workspace_bytes < at.bytes) return cudaErrorInvalidValue;
  uint8_t* base = sm100::Arena::Base(gemm.workspace);
  if (cudaError_t error = PrepareFp8Sm100(stream, fp8, at, base)) return error;
  const bool wgrad = gemm.product.wgrad;
  if (!wgrad && gemm.out_dtype == DType::kBF16) {
    return MultiplyFp8Sm100<cutlass::bfloat16_t, false>(stream, fp8, at, base);
  }
  if constexpr (!kSample) {
    if (gemm.out_dtype != DType::kF32) return cudaErrorNotSupported;
    return wgrad ? MultiplyFp8Sm100<float, true>(stream, fp8, at, base)
                 : MultiplyFp8Sm100<float, false>(stream, fp8, at, base);
  }
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

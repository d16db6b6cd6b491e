#include "fp8/gemm_sm90.cuh"

namespace jgg {

cudaError_t LaunchFp8GemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands,
                              bool rows_first) {
  using cutlass::bfloat16_t, device::Fp8MmSm90, device::Fp8WgradSm90;
  fp8.gemm.l_k_major = fp8.gemm.r_k_major = true;
  const bool wgrad = fp8.gemm.wgrad;
  if (fp8.gemm.out_dtype == DType::kF32) {
    return wgrad ? LaunchFp8ConfigSm90<Fp8WgradSm90, float>(stream, fp8, operands)
                 : LaunchFp8ConfigSm90<Fp8MmSm90, float>(stream, fp8, operands);
  }
  if (fp8.gemm.out_dtype == DType::kBF16) {
    return wgrad ? LaunchFp8ConfigSm90<Fp8WgradSm90, bfloat16_t>(stream, fp8, operands)
                 : LaunchFp8MmSm90Instance<bfloat16_t>(stream, fp8, operands, rows_first);
  }
#ifdef JGG_SAMPLE
  return cudaErrorNoKernelImageForDevice;
#else
  return wgrad ? LaunchFp8ConfigSm90<Fp8WgradSm90, cutlass::half_t>(stream, fp8, operands)
               : LaunchFp8MmSm90Instance<cutlass::half_t>(stream, fp8, operands, rows_first);
#endif
}

}  // namespace jgg

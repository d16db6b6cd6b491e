#include "fp8/gemm_sm90.cuh"

namespace jgg {

cudaError_t LaunchFp8GemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands) {
  using cutlass::bfloat16_t, device::Fp8GemmSm90Config;
  fp8.gemm.l_k_major = fp8.gemm.r_k_major = true;
  const bool bf16 = fp8.gemm.out_dtype == DType::kBF16;
  if (!fp8.gemm.wgrad && fp8.gemm.out_dtype == DType::kF32) {
    return LaunchFp8ConfigSm90<Fp8GemmSm90Config<float, false, true>>(stream, fp8, operands);
  }
  if (!fp8.gemm.wgrad && bf16) return LaunchFp8MmSm90Instance<bfloat16_t>(stream, fp8, operands);
  if (fp8.gemm.out_dtype == DType::kF32) {
    return LaunchFp8ConfigSm90<Fp8GemmSm90Config<float, true, true>>(stream, fp8, operands);
  }
  if (bf16) {
    return LaunchFp8ConfigSm90<Fp8GemmSm90Config<bfloat16_t, true>>(stream, fp8, operands);
  }
#ifdef JGG_SAMPLE
  return cudaErrorNoKernelImageForDevice;
#else
  return fp8.gemm.wgrad
             ? LaunchFp8ConfigSm90<Fp8GemmSm90Config<cutlass::half_t, true>>(stream, fp8, operands)
             : LaunchFp8MmSm90Instance<cutlass::half_t>(stream, fp8, operands);
#endif
}

}  // namespace jgg

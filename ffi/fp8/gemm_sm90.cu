#include "fp8/gemm_sm90.cuh"

namespace jgg {

cudaError_t LaunchFp8GemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands) {
  using cutlass::bfloat16_t, cutlass::half_t, device::Fp8GemmSm90Config;
  fp8.gemm.l_k_major = fp8.gemm.r_k_major = true;
  const bool bf16 = fp8.gemm.out_dtype == DType::kBF16;
  if (!fp8.gemm.wgrad && fp8.gemm.out_dtype == DType::kF32) {
    return LaunchFp8ConfigSm90<Fp8GemmSm90Config<float, false, true>>(stream, fp8, operands);
  }
  if (!fp8.gemm.wgrad) {
    return bf16 ? LaunchFp8MmSm90Instance<bfloat16_t>(stream, fp8, operands)
                : LaunchFp8MmSm90Instance<half_t>(stream, fp8, operands);
  }
  if (fp8.gemm.out_dtype == DType::kF32) {
    return LaunchFp8ConfigSm90<Fp8GemmSm90Config<float, true, true>>(stream, fp8, operands);
  }
  return bf16 ? LaunchFp8ConfigSm90<Fp8GemmSm90Config<bfloat16_t, true>>(stream, fp8, operands)
              : LaunchFp8ConfigSm90<Fp8GemmSm90Config<half_t, true>>(stream, fp8, operands);
}

}  // namespace jgg

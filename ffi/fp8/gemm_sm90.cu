#include "fp8/gemm_sm90.cuh"

namespace jgg {

template <typename Element>
static cudaError_t LaunchFp8WgradSm90(cudaStream_t stream, Fp8GemmSm90& fp8,
                                      const OperandsSm90& operands) {
  constexpr bool kWide = std::is_same_v<Element, float>;
  using device::Fp8GemmSm90Config, device::Listed;
  if (fp8.powers) {
    using Config = Fp8GemmSm90Config<Element, true, kWide, Listed::kNothing, false, true>;
    return LaunchFp8ConfigSm90<Config>(stream, fp8, operands);
  }
  return LaunchFp8ConfigSm90<Fp8GemmSm90Config<Element, true, kWide>>(stream, fp8, operands);
}

cudaError_t LaunchFp8GemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands) {
  using cutlass::bfloat16_t, device::Fp8GemmSm90Config;
  fp8.gemm.l_k_major = fp8.gemm.r_k_major = true;
  const bool wgrad = fp8.gemm.wgrad;
  switch (fp8.gemm.out_dtype) {
    case DType::kF32:
      if (wgrad) return LaunchFp8WgradSm90<float>(stream, fp8, operands);
      return LaunchFp8ConfigSm90<Fp8GemmSm90Config<float, false, true>>(stream, fp8, operands);
    case DType::kBF16:
      return wgrad ? LaunchFp8WgradSm90<bfloat16_t>(stream, fp8, operands)
                   : LaunchFp8MmSm90Instance<bfloat16_t>(stream, fp8, operands);
    case DType::kF16:
#ifndef JGG_SAMPLE
      return wgrad ? LaunchFp8WgradSm90<cutlass::half_t>(stream, fp8, operands)
                   : LaunchFp8MmSm90Instance<cutlass::half_t>(stream, fp8, operands);
#endif
      break;
  }
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

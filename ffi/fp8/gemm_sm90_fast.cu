// Kernels of FP8 products whose operands have one scale for a matrix, and no promotion.
#include "common/sample.h"
#include "fp8/gemm_sm90.cuh"

namespace jgg {

template <typename Products, typename Element, bool kL, bool kR>
static cudaError_t LaunchFast(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands) {
  return LaunchFp8ConfigSm90<device::Fp8FastSm90<Products, kL, kR>, Element>(stream, fp8, operands);
}

template <typename Products, typename Element>
static cudaError_t LaunchFast(cudaStream_t stream, Fp8GemmSm90& fp8, const OperandsSm90& operands) {
  if (!fp8.l_e5m2 && !fp8.r_e5m2) {
    return LaunchFast<Products, Element, false, false>(stream, fp8, operands);
  }
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    if (!fp8.r_e5m2) return LaunchFast<Products, Element, true, false>(stream, fp8, operands);
    if constexpr (Products::kRaggedK) {
      if (!fp8.l_e5m2) return LaunchFast<Products, Element, false, true>(stream, fp8, operands);
    }
    return cudaErrorNotSupported;
  }
}

cudaError_t LaunchFp8FastGemmSm90(cudaStream_t stream, Fp8GemmSm90& fp8,
                                  const OperandsSm90& operands) {
  using cutlass::bfloat16_t, device::Fp8MmSm90, device::Fp8WgradSm90;
  fp8.gemm.l_k_major = fp8.gemm.r_k_major = true;
  const bool wgrad = fp8.gemm.wgrad;
  if (fp8.gemm.out_dtype == DType::kF32) {
    return wgrad ? LaunchFast<Fp8WgradSm90, float>(stream, fp8, operands)
                 : LaunchFast<Fp8MmSm90, float>(stream, fp8, operands);
  }
  return wgrad ? LaunchFast<Fp8WgradSm90, bfloat16_t>(stream, fp8, operands)
               : LaunchFast<Fp8MmSm90, bfloat16_t>(stream, fp8, operands);
}

}  // namespace jgg

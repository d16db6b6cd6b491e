#include "fp8/gemm_sm89.cuh"

namespace jgg {

cudaError_t LaunchFp8GemmSm89(cudaStream_t stream, const Fp8GemmSm89& fp8) {
  const bool wgrad = fp8.gemm.product == GemmSm80::Product::kWgrad;
  if (fp8.e5m2) {
    return wgrad ? LaunchFp8GemmSm89Instance<true, true>(stream, fp8)
                 : LaunchFp8GemmSm89Instance<false, true>(stream, fp8);
  }
  return wgrad ? LaunchFp8GemmSm89Instance<true, false>(stream, fp8)
               : LaunchFp8GemmSm89Instance<false, false>(stream, fp8);
}

}  // namespace jgg

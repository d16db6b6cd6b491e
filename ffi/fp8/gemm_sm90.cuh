// Host side of the Hopper kernel of FP8 products: launch.
#pragma once

#include "fp8/device/gemm_sm90.cuh"
#include "fp8/gemm_sm90.h"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

// Element: of the result.
template <typename Products, typename Element>
cudaError_t LaunchFp8ConfigSm90(cudaStream_t stream, Fp8GemmSm90& fp8,
                                const OperandsSm90& operands) {
  using Config = device::Fp8GemmSm90Config<Products, device::Fp8StoreSm90<Element>>;
  GemmSm90& gemm = fp8.gemm;
  if (!HasStoreWarpSm90<Config>(gemm)) return cudaErrorNotSupported;
  if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, operands)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  return LaunchTilesSm90<Config, device::Fp8GemmSm90Kernel<Config>>(stream, gemm, fp8);
}

template <typename Element>
cudaError_t LaunchFp8MmSm90Instance(cudaStream_t stream, Fp8GemmSm90& fp8,
                                    const OperandsSm90& operands, bool rows_first) {
  if (rows_first) {
    return LaunchFp8ConfigSm90<device::Fp8RowsFirstSm90, Element>(stream, fp8, operands);
  }
  return LaunchFp8ConfigSm90<device::Fp8MmSm90, Element>(stream, fp8, operands);
}

}  // namespace jgg

// Host side of device/up_and_down_sm90.cuh.
#pragma once

#include "grouped_mm/up_and_down_sm90.cuh"
#include "quantized/device/up_and_down_sm90.cuh"
#include "quantized/gemm_sm90.cuh"

namespace jgg {

template <typename Weights>
cudaError_t LaunchUpAndDownConfigSm90(cudaStream_t stream, UpAndDownSm90& both,
                                      const OperandsSm90* const (&operands)[2]) {
  using Config = device::UpAndDownSm90Config<ByWarpsSm90<QuantizedHalvesRows16Sm90<Weights>>>;
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    QuantizedGemmSm90& quantized = both.products[i];
    if (cudaError_t error = EncodeRowsOfStages<Config>(operands[i]->l, quantized.gemm))
      return error;
    quantized.asks_for_small = Config::kHasSmall && Weights::AsksForSmall(quantized);
    quantized.unit = quantized.asks_for_small ? Weights::kSmallFactor : Weights::kFactor;
    tiles += MostTilesSm90<Config>(quantized.gemm);
  }
  return LaunchBothSm90<Config, device::UpAndDownSm90Kernel<Config>>(stream, tiles, both);
}

template <Mode kMode, int kBits>
cudaError_t LaunchUpAndDownInstanceSm90(cudaStream_t stream, UpAndDownSm90& both,
                                        const OperandsSm90& up, const OperandsSm90& down) {
  using Weights = device::PackedWeights<kMode, kBits>;
  if constexpr (Weights::kSixteens) {
    return LaunchUpAndDownConfigSm90<Weights>(stream, both, {&up, &down});
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jgg

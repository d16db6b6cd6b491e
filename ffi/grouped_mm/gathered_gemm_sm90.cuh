// Host side of the Hopper kernel with rows by list: choice of a tile, launch.
#pragma once

#include "grouped_mm/device/gathered_gemm_sm90.cuh"
#include "grouped_mm/gathered_gemm_sm90.h"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

template <typename Config>
cudaError_t LaunchGatheredConfigSm90(cudaStream_t stream, GatheredGemmSm90& gathered,
                                     const OperandsSm90& operands) {
  TensorMapSpec r = operands.r;
  r.box_lines = 64;
  if (cudaError_t error = EncodeTensorMap(r, &gathered.gemm.r_map)) return error;
  return LaunchTilesSm90<Config, device::GatheredGemmSm90Kernel<Config>>(stream, gathered.gemm,
                                                                         gathered);
}

// 32 rows where there are few, 256 where there are many; fewer tiles to choose from than without a
// list, and no pairs of blocks.
template <typename Element, bool kRKMajor>
cudaError_t LaunchGatheredGemmSm90Instance(cudaStream_t stream, GatheredGemmSm90& gathered,
                                           const OperandsSm90& operands) {
  auto launch = [&](auto rows, auto blocks, auto stages) {
    return LaunchGatheredConfigSm90<device::GemmSm90Config<Element, true, kRKMajor, rows.value,
                                                           blocks.value, stages.value, 1, 1, true>>(
        stream, gathered, operands);
  };
  using device::Constant;
  using One = device::Constant<1>;
  using Two = device::Constant<2>;
  const int64_t rows = TypicalRowsSm90(gathered.gemm);
  if (IsGated(gathered.gemm.epilogue.activation)) {
    if (rows <= 32) return launch(Constant<32>{}, Two{}, Constant<5>{});
    return launch(Constant<128>{}, Two{}, Constant<4>{});
  }
  if (rows <= 16) return launch(Constant<32>{}, One{}, Constant<10>{});
  if (rows <= 96 || gathered.gemm.n <= 128) {
    return launch(Constant<128>{}, One{}, Constant<6>{});
  }
  return launch(Constant<256>{}, One{}, Constant<4>{});
}

}  // namespace jgg

// Host side of the Hopper kernel with rows by list: choice of a tile, launch.
#pragma once

#include "grouped_mm/device/gathered_gemm_sm90.cuh"
#include "grouped_mm/gathered_gemm_sm90.h"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

// The operands of a product with rows by list.
template <typename Element, bool kRKMajor>
struct GatheredSm90 : TraitsSm90<Element, true, kRKMajor> {
  static constexpr bool kGathered = true;
};

// Tiles as without a list, but no pairs of blocks: one that gathers L shares none.
template <typename Traits>
struct AloneSm90 : Traits {
  static constexpr int kCluster = 1;
};

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
  using Operands = GatheredSm90<Element, kRKMajor>;
  auto launch = [&](auto traits) {
    return LaunchGatheredConfigSm90<ConfigSm90<decltype(traits)>>(stream, gathered, operands);
  };
  const int64_t rows = TypicalRowsSm90(gathered.gemm);
  if (IsGated(gathered.gemm.epilogue.activation)) {
    if (rows <= 32) return launch(GatedRows32Sm90<Operands>{});
    return launch(AloneSm90<GatedRows128Sm90<Operands>>{});
  }
  if (rows <= 16) return launch(Rows32Sm90<Operands>{});
  if (rows <= 96 || gathered.gemm.n <= 128) {
    return launch(Rows128Sm90<Operands>{});
  }
  return launch(AloneSm90<Rows256Sm90<Operands>>{});
}

}  // namespace jgg

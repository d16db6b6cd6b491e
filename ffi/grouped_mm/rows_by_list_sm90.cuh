// Host side of the Hopper kernel with rows by list.
#pragma once

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/device/rows_by_list_sm90.cuh"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

// A kernel with rows by list. It has no pairs of blocks: one that gathers L shares none.
template <typename Kernel>
struct OfRowsByListSm90 : Kernel {
  struct Loader : Kernel::Loader {
    static constexpr int kCluster = 1;
    static constexpr device::ByList kByList = device::ByList::kRowsOfBoth;
  };
};

template <typename Config>
cudaError_t LaunchRowsByListConfigSm90(cudaStream_t stream, RowsByListSm90& by_list,
                                       const OperandsSm90& operands) {
  TensorMapSpec r = operands.r;
  r.box_lines = 64;
  if (cudaError_t error = EncodeTensorMap(r, &by_list.gemm.r_map)) return error;
  return LaunchTilesSm90<Config, device::RowsByListSm90Kernel<Config>>(stream, by_list.gemm,
                                                                       by_list);
}

template <typename Element, bool kRKMajor>
cudaError_t LaunchRowsByListSm90Instance(cudaStream_t stream, RowsByListSm90& by_list,
                                         const OperandsSm90& operands) {
  using Operands = DenseSm90<Element, true, kRKMajor>;
  auto launch = [&](auto kernel) {
    using Config = ConfigSm90<OfRowsByListSm90<decltype(kernel)>>;
    return LaunchRowsByListConfigSm90<Config>(stream, by_list, operands);
  };
  const int tile = operands.plan.tile;
  if (IsGated(by_list.gemm.epilogue.activation)) {
    if (tile == 32) return launch(GatedRows32Sm90<Operands>{});
    return launch(GatedRows128Sm90<Operands>{});
  }
  if (tile == 32) return launch(Rows32Sm90<Operands>{});
  if (tile == 128) return launch(Rows128Sm90<Operands>{});
  return launch(Rows256Sm90<Operands>{});
}

}  // namespace jgg

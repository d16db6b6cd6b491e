// Host side of the Hopper kernel of which one operand comes by list.
#pragma once

#include "grouped_mm/device/listed_gemm_sm90.cuh"
#include "grouped_mm/gemm_sm90.cuh"
#include "grouped_mm/listed_gemm_sm90.h"

namespace jgg {

template <typename Traits>
struct RowsListedSm90 : Traits {
  static constexpr device::Listed kListed = device::Listed::kRowsL;
};

template <typename Traits, bool kTransposed_>
struct LinesListedSm90 : Traits {
  static constexpr device::Listed kListed = device::Listed::kLinesR;
  static constexpr bool kTransposed = kTransposed_;
};

template <typename Config>
cudaError_t LaunchListedConfigSm90(cudaStream_t stream, ListedGemmSm90& listed,
                                   const OperandsSm90& operands) {
  GemmSm90& gemm = listed.gemm;
  // Nothing else would store.
  if (!Config::kGates && !HasStoreWarpSm90<Config>(gemm)) return cudaErrorNotSupported;
  if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, operands)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  return LaunchTilesSm90<Config, device::ListedGemmSm90Kernel<Config>>(
      stream, gemm, listed,
      [&gemm](int64_t tiles, int clusters) { ShareOutSm90<Config>(gemm, tiles, clusters); });
}

template <typename Element>
cudaError_t LaunchListedGemmSm90Instance(cudaStream_t stream, ListedGemmSm90& listed,
                                         const OperandsSm90& operands, bool transposed) {
  auto launch = [&](auto traits) {
    return LaunchListedConfigSm90<ConfigSm90<decltype(traits)>>(stream, listed, operands);
  };
  if (listed.gemm.wgrad) {
    using Tile = Rows256Sm90<TraitsSm90<Element, false, false>>;
    if (transposed) return launch(LinesListedSm90<Tile, true>{});
    return launch(LinesListedSm90<Tile, false>{});
  }
  return DispatchBool(operands.r_k_major, [&](auto r) {
    using Operands = TraitsSm90<Element, true, decltype(r)::value>;
    if (IsGated(listed.gemm.epilogue.activation)) {
      return launch(RowsListedSm90<GateApartRows256Sm90<Operands>>{});
    }
    return launch(RowsListedSm90<Rows256Sm90<Operands>>{});
  });
}

}  // namespace jgg

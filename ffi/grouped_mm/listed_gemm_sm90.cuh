// Host side of the Hopper kernel of which one operand comes by list.
#pragma once

#include "grouped_mm/device/listed_gemm_sm90.cuh"
#include "grouped_mm/gemm_sm90.cuh"
#include "grouped_mm/listed_gemm_sm90.h"

namespace jgg {

// A pair of these takes as much from L2 as one of 256 rows whose blocks share L.
template <typename Operands>
struct RowsListedSm90 : Operands {
  static constexpr int kRows = 128, kBlocks = 2, kStages = 4, kCluster = 2;
  static constexpr device::Listed kListed = device::Listed::kRowsL;
};
template <typename Operands>
struct GateApartRowsListedSm90 : RowsListedSm90<Operands> {
  static constexpr bool kGates = true;
};
template <typename Operands>
struct BackwardOfSwigluSm90 : RowsListedSm90<Operands> {
  static constexpr Activation kBackward = Activation::kSwiglu;
};

template <typename Traits, bool kTransposed_>
struct LinesListedSm90 : Traits {
  static constexpr device::Listed kListed = device::Listed::kLinesR;
  static constexpr bool kTransposed = kTransposed_;
};

template <typename Config>
cudaError_t EncodeBackwardSm90(ListedGemmSm90& listed) {
  if (!Config::kGoesBack) return cudaSuccess;
  const GemmSm90& gemm = listed.gemm;
  BackwardSm90& backward = listed.backward;
  TensorMapSpec spec{backward.h, gemm.out_dtype, gemm.n, gemm.rows_y, 2, 2 * gemm.n, gemm.n};
  spec.box_lines = device::kBackwardRows;
  if (cudaError_t error = EncodeTensorMap(spec, &backward.h_map)) return error;
  spec.data = backward.dh;
  if (cudaError_t error = EncodeTensorMap(spec, &backward.dh_map)) return error;
  spec.box_lines = 8;
  return EncodeTensorMap(spec, &backward.dh_rest);
}

template <typename Config>
cudaError_t LaunchListedConfigSm90(cudaStream_t stream, ListedGemmSm90& listed,
                                   const OperandsSm90& operands) {
  GemmSm90& gemm = listed.gemm;
  // Nothing else would store.
  if (!Config::kGates && !HasStoreWarpSm90<Config>(gemm)) return cudaErrorNotSupported;
  if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, operands)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  if (cudaError_t error = EncodeBackwardSm90<Config>(listed)) return error;
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
      return launch(GateApartRowsListedSm90<Operands>{});
    }
    if (listed.backward.h != nullptr) return launch(BackwardOfSwigluSm90<Operands>{});
    return launch(RowsListedSm90<Operands>{});
  });
}

}  // namespace jgg

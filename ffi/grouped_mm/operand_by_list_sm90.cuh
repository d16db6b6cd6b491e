// Host side of the Hopper kernel of which one operand comes by list.
#pragma once

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/device/operand_by_list_sm90.cuh"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

// mm, rows of L by list. A pair of these tiles takes as much from L2 as one of 256 rows whose
// blocks share L.
template <typename Operands>
struct RowsOfLByListSm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = 4, kCluster = 2;
    static constexpr bool kStacked = true;
    static constexpr device::ByList kByList = device::ByList::kRowsOfL;
  };
  struct Products : Operands {
    static constexpr int kRows = 128, kBlocks = 2;
  };
  using Store = device::StoreSm90;
};
template <typename Operands>
struct GateApartByListSm90 : RowsOfLByListSm90<Operands> {
  using Store = GateApartStoreSm90;
};
template <typename Operands>
struct BackwardOfRowsSm90 : RowsOfLByListSm90<Operands> {
  struct Store : device::StoreSm90 {
    static constexpr Activation kBackward = kBackwardSm90;
  };
};

// wgrad, lines of R by list.
template <typename Kernel>
struct LinesOfRByListSm90 : Kernel {
  struct Loader : Kernel::Loader {
    static constexpr device::ByList kByList = device::ByList::kLinesOfR;
  };
};
template <typename Kernel>
struct TransposedByListSm90 : LinesOfRByListSm90<Kernel> {
  struct Store : Kernel::Store {
    static constexpr bool kTransposed = true;
  };
};

inline cudaError_t EncodeBackwardSm90(OperandByListSm90&) { return cudaSuccess; }

inline cudaError_t EncodeBackwardSm90(BackwardByListSm90& by_list) {
  const GemmSm90& gemm = by_list.gemm;
  BackwardSm90& backward = by_list.backward;
  TensorMapSpec spec{backward.h, gemm.out_dtype, gemm.n, gemm.rows_y, 2, 2 * gemm.n, gemm.n};
  spec.box_lines = device::kBackwardRows;
  if (cudaError_t error = EncodeTensorMap(spec, &backward.h_map)) return error;
  spec.data = backward.dh;
  if (cudaError_t error = EncodeTensorMap(spec, &backward.dh_map)) return error;
  spec.box_lines = 8;
  return EncodeTensorMap(spec, &backward.dh_rest);
}

// Argument: OperandByListSm90 or BackwardByListSm90.
template <typename Kernel, typename Argument>
cudaError_t LaunchOperandByListKernelSm90(cudaStream_t stream, Argument& by_list,
                                          const OperandsSm90& operands) {
  using Config = ConfigSm90<Kernel>;
  GemmSm90& gemm = by_list.gemm;
  // Nothing else would store.
  if (!Config::kGates && !HasStoreWarpSm90<Config>(gemm)) return cudaErrorNotSupported;
  if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, operands)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  if (cudaError_t error = EncodeBackwardSm90(by_list)) return error;
  return LaunchTilesSm90<Config, device::OperandByListSm90Kernel<Config, Argument>>(
      stream, gemm, by_list,
      [&gemm](int64_t tiles, int clusters) { ShareOutSm90<Config>(gemm, tiles, clusters); });
}

template <typename Element>
cudaError_t LaunchOperandByListSm90Instance(cudaStream_t stream, OperandByListSm90& by_list,
                                            const OperandsSm90& operands, bool transposed) {
  auto launch = [&](auto kernel) {
    return LaunchOperandByListKernelSm90<decltype(kernel)>(stream, by_list, operands);
  };
  if (by_list.gemm.wgrad) {
    using Tile = Rows256Sm90<DenseSm90<Element, false, false>>;
    if (transposed) return launch(TransposedByListSm90<Tile>{});
    return launch(LinesOfRByListSm90<Tile>{});
  }
  return DispatchBool(operands.r_k_major, [&](auto r) {
    using Operands = DenseSm90<Element, true, decltype(r)::value>;
    if (IsGated(by_list.gemm.epilogue.activation)) return launch(GateApartByListSm90<Operands>{});
    return launch(RowsOfLByListSm90<Operands>{});
  });
}

template <typename Element>
cudaError_t LaunchBackwardByListSm90Instance(cudaStream_t stream, BackwardByListSm90& by_list,
                                             const OperandsSm90& operands) {
  return DispatchBool(operands.r_k_major, [&](auto r) {
    using Kernel = BackwardOfRowsSm90<DenseSm90<Element, true, decltype(r)::value>>;
    return LaunchOperandByListKernelSm90<Kernel>(stream, by_list, operands);
  });
}

}  // namespace jgg

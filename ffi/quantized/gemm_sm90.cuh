// Host side of the Hopper kernels of qmm: the tiles that plans name (plan.h), and their launch.
#pragma once

#include <algorithm>

#include "common/processors.h"
#include "grouped_mm/gemm_sm90.cuh"
#include "quantized/device/direct_epilogue_sm90.cuh"
#include "quantized/device/direct_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/linear_weights_sm90.cuh"
#include "quantized/device/packed_weights_sm90.cuh"
#include "quantized/device/scaled_lines_sm90.cuh"
#include "quantized/device/scaled_rows_sm90.cuh"
#include "quantized/device/scaled_tiles_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg {

// Tiles, by their rows. Weights are PackedWeights or LinearWeights.
template <typename Weights>
struct QuantizedRows32Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 32, kMostStages = 8, kBlocksPerSm = Weights::kBlocksPerSm;
};
template <typename Weights>
struct QuantizedRows64Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 64, kMostStages = 7, kBlocksPerSm = Weights::kBlocksOf64;
};
template <typename Weights>
struct QuantizedRows128Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 128, kMostStages = 4, kCluster = 2;
  static constexpr bool kAdapters = Weights::kTakesAdapters;
};
template <typename Weights>
struct QuantizedMostRowsSm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = Weights::kMostRows, kMostStages = 4, kCluster = 2;
  static constexpr bool kAdapters = Weights::kTakesAdapters;
};

template <typename Weights>
struct QuantizedGatedRows32Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 32, kBlocks = 2, kMostStages = 7;
};
template <typename Weights>
struct QuantizedGatedRows96Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 96, kBlocks = 2, kMostStages = 4;
};
template <typename Weights>
struct QuantizedGatedRows64Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 64, kBlocks = 2, kMostStages = 4;
};

// Tiles of few rows, with two blocks of columns and two blocks of a multiprocessor: gates and what
// they let through, or both halves of W's columns.
template <typename Weights>
struct QuantizedGatedRows16Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 16, kBlocks = 2, kMostStages = 8, kBlocksPerSm = 2;
};
template <typename Weights>
struct QuantizedHalvesRows16Sm90 : QuantizedGatedRows16Sm90<Weights> {
  static constexpr bool kHalves = true;
};

template <typename Weights>
struct ScaledTilesSm90 : device::ScaledTraitsSm90<Weights> {
  static constexpr int kMostStages = 4, kCluster = 2;
};

// A tile of few rows that warps multiply by themselves. tools/check_sass.py knows it by this name.
template <typename Traits>
struct ByWarpsSm90 : Traits {
  static constexpr bool kWarps = true;
};

// x's maps, where one thread copies stages: slices of k are matrices, so that a stage's are a box.
template <typename Config>
cudaError_t EncodeRowsOfStages(TensorMapSpec l, GemmSm90& gemm) {
  l.groups = l.inner / 64;
  l.inner = l.group = 64;
  for (int i = 0; i < 3; ++i) {
    l.box_lines = (Config::kMostBoxRows / 4) << i;
    l.box_groups = Config::StageSlices(l.box_lines);
    CUtensorMap* const map = i < 2 ? &gemm.rest_maps.l[i] : &gemm.l_map;
    if (cudaError_t error = EncodeTensorMap(l, map)) return error;
  }
  return cudaSuccess;
}

template <typename Config>
cudaError_t LaunchQuantizedConfigSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                      const rules::QmmPlanSm90& plan,
                                      const OperandsSm90& operands) {
  GemmSm90& gemm = quantized.gemm;
  gemm.l_k_major = true;
  if constexpr (Config::Weights::kFloats) {
    quantized.x = static_cast<const float*>(operands.l.data);
  } else if constexpr (Config::kCopiesStages) {
    if (cudaError_t error = EncodeRowsOfStages<Config>(operands.l, gemm)) return error;
  } else {
    TensorMapSpec l = operands.l;
    l.box_lines = Config::kChunkL;
    if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  }
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  gemm.parts = Config::kSharesK ? plan.parts : 1;
  using Weights = typename Config::Weights;
  quantized.asks_for_small = Config::kHasSmall && Weights::AsksForSmall(quantized);
  quantized.unit = quantized.asks_for_small ? Weights::kSmallFactor : Weights::kFactor;
  return LaunchTilesSm90<Config, device::QuantizedGemmSm90Kernel<Config>>(stream, gemm, quantized);
}

// Tiles of 32 rows. float16 rows have those of warps alone.
template <typename Traits>
cudaError_t LaunchFewRowsSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                              const rules::QmmPlanSm90& plan, const OperandsSm90& operands) {
  const auto launch = [&](auto traits) {
    using Config = device::QuantizedGemmSm90Config<decltype(traits)>;
    return LaunchQuantizedConfigSm90<Config>(stream, quantized, plan, operands);
  };
  using Weights = typename Traits::Weights;
  if constexpr (Weights::kSixteens) {
    if (HasSixteens(quantized.gemm, plan)) {
      if (Traits::kBlocks == 2) return launch(ByWarpsSm90<QuantizedGatedRows16Sm90<Weights>>{});
      return launch(ByWarpsSm90<QuantizedHalvesRows16Sm90<Weights>>{});
    }
  }
  if constexpr (!Weights::kAlwaysWarps && Weights::kX != DType::kF16) {
    if (plan.way == rules::QmmWay::kTiles) return launch(Traits{});
  }
  return launch(ByWarpsSm90<Traits>{});
}

template <typename Weights>
cudaError_t LaunchQuantizedTilesSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const rules::QmmPlanSm90& plan, const OperandsSm90& operands) {
  const auto launch = [&](auto traits) {
    using Config = device::QuantizedGemmSm90Config<decltype(traits)>;
    return LaunchQuantizedConfigSm90<Config>(stream, quantized, plan, operands);
  };
  if (IsGated(quantized.gemm.epilogue.activation)) {
    using FewRows = QuantizedGatedRows32Sm90<Weights>;
    if (plan.tile == 32) return LaunchFewRowsSm90<FewRows>(stream, quantized, plan, operands);
    using ManyRows = std::conditional_t<Weights::kScalesSums, QuantizedGatedRows64Sm90<Weights>,
                                        QuantizedGatedRows96Sm90<Weights>>;
    return launch(ManyRows{});
  }
  using FewRows = QuantizedRows32Sm90<Weights>;
  if (plan.tile == 32) return LaunchFewRowsSm90<FewRows>(stream, quantized, plan, operands);
  if (plan.tile == 64) return launch(QuantizedRows64Sm90<Weights>{});
  if constexpr (Weights::kScalesSums) {
    return launch(QuantizedRows128Sm90<Weights>{});
  } else {
    if constexpr (Weights::kX != DType::kF16) {
      if (plan.tile == 128) return launch(QuantizedRows128Sm90<Weights>{});
    }
    return launch(QuantizedMostRowsSm90<Weights>{});
  }
}

template <typename Weights, bool kGated, int kEights, bool kPairs = false>
cudaError_t LaunchDirectConfigSm90(cudaStream_t stream, const device::DirectGemmSm90& direct,
                                   bool alone) {
  const auto columns = static_cast<unsigned>(kGated || kPairs ? direct.n / 2 : direct.n);
  constexpr int kRows = kEights * device::kDirectRows;
  const auto rows =
      static_cast<unsigned>(alone ? rules::DirectRowTiles(direct.rows, kRows) : direct.rows);
  if (rows == 0 || columns == 0) return cudaSuccess;
  device::DirectGemmSm90Kernel<Weights, kGated, device::DirectEpilogue, kEights, kPairs>
      <<<dim3{columns / 16, rows}, 32 * device::kDirectWarps, 0, stream>>>(direct);
  return cudaGetLastError();
}

template <typename Weights>
cudaError_t LaunchDirectSm90(cudaStream_t stream, const QuantizedGemmSm90& quantized,
                             const rules::QmmPlanSm90& plan, const OperandsSm90& operands) {
  static_assert(rules::kDirectRows == device::kDirectRows && kMostParts == 2);
  static_assert(Weights::kMostRows == rules::kMostQmmRows);
  const GemmSm90& gemm = quantized.gemm;
  device::DirectGemmSm90 direct{};
  direct.metadata = gemm.metadata;
  direct.epilogue = gemm.epilogue;
  direct.x = static_cast<const char*>(operands.l.data);
  direct.out = gemm.out;
  direct.out_dtype = gemm.out_dtype;
  direct.rows = gemm.rows_y;
  direct.n = gemm.n;
  direct.groups = gemm.groups;
  direct.scales = quantized.scales;
  direct.global_scale = quantized.global_scale;
  direct.packed = quantized.packed;
  const bool alone = gemm.metadata.HasEntryOfEach(1);
  const bool gated = IsGated(gemm.epilogue.activation);
  if (plan.tile == rules::kDirectRows) {
    return gated ? LaunchDirectConfigSm90<Weights, true, 1>(stream, direct, alone)
                 : LaunchDirectConfigSm90<Weights, false, 1>(stream, direct, alone);
  }
  if (gated) return LaunchDirectConfigSm90<Weights, true, 2>(stream, direct, alone);
  return plan.pairs ? LaunchDirectConfigSm90<Weights, false, 2, true>(stream, direct, alone)
                    : LaunchDirectConfigSm90<Weights, false, 2>(stream, direct, alone);
}

template <Mode kMode, int kBits>
cudaError_t LaunchPackedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const rules::QmmPlanSm90& plan, const OperandsSm90& operands) {
  if (operands.dtype == DType::kF16) {
    using Half = device::PackedWeights<kMode, kBits, DType::kF16>;
    return LaunchQuantizedTilesSm90<Half>(stream, quantized, plan, operands);
  }
  if (plan.way == rules::QmmWay::kScaled) {
    if constexpr (FormatTraits<kMode, kBits>::kScale == ScaleType::kScaleAndBias ||
                  FormatTraits<kMode, kBits>::kScale == ScaleType::kFloat32) {
      using Weights = device::ScaledWeights<kMode, kBits>;
      if (plan.tile == rules::kScaledTileRows) {
        using Config = device::ScaledGemmSm90Config<ScaledTilesSm90<Weights>>;
        return LaunchQuantizedConfigSm90<Config>(stream, quantized, plan, operands);
      }
      using Config = device::QuantizedGemmSm90Config<ByWarpsSm90<QuantizedRows32Sm90<Weights>>>;
      return LaunchQuantizedConfigSm90<Config>(stream, quantized, plan, operands);
    }
  }
  using Weights = device::PackedWeights<kMode, kBits>;
  if (plan.way == rules::QmmWay::kDirect) {
    return LaunchDirectSm90<Weights>(stream, quantized, plan, operands);
  }
  return LaunchQuantizedTilesSm90<Weights>(stream, quantized, plan, operands);
}

template <Mode kMode, int kBits>
cudaError_t LaunchLinearInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const rules::QmmPlanSm90& plan, const OperandsSm90& operands) {
  using Format = FormatTraits<kMode, kBits>;
  if (operands.dtype == DType::kF16) {
    if constexpr (Format::kHasLinesSm90) {
      using Half = device::LinearWeights<kMode, kBits, DType::kF16>;
      return LaunchQuantizedTilesSm90<Half>(stream, quantized, plan, operands);
    }
    return cudaErrorInvalidValue;
  }
  if (plan.way == rules::QmmWay::kScaled) {
    if constexpr (Format::kScale == ScaleType::kScaleAndBias && Format::kHasLinesSm90) {
      const auto launch = [&](auto weights, auto tile) {
        using Traits = ByWarpsSm90<QuantizedRows32Sm90<decltype(weights)>>;
        using Config = device::ScaledLinesSm90Config<Traits>;
        static_assert(Config::kRows == decltype(tile)::value);
        return LaunchQuantizedConfigSm90<Config>(stream, quantized, plan, operands);
      };
      if (plan.tile == rules::kFloatLinesTile) {
        return launch(device::FloatLines<kBits>{}, device::Constant<rules::kFloatLinesTile>{});
      }
      return launch(device::ScaledLines<kBits>{}, device::Constant<rules::kScaledLinesTile>{});
    }
    return cudaErrorInvalidValue;
  }
  if constexpr (Format::kHasLinesSm90) {
    using Weights = device::LinearWeights<kMode, kBits>;
    return LaunchQuantizedTilesSm90<Weights>(stream, quantized, plan, operands);
  } else {
    return cudaErrorInvalidValue;  // it has no kernel
  }
}

}  // namespace jgg

// Host side of the Hopper kernels of x @ W, with W quantized along its columns: tiles that plans
// name (plan.h), and their launch.
#pragma once

#include <algorithm>

#include "grouped_mm/gemm_sm90.cuh"
#include "quantized/device/transposed_scaled_lines_sm90.cuh"
#include "quantized/device/transposed_scaled_sm90.cuh"
#include "quantized/device/transposed_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg {

// Tiles, by their rows. Weights are TransposedPacked or TransposedLines.
template <typename Weights>
struct TransposedRows16Sm90 : device::TransposedTraitsSm90<Weights> {
  static constexpr int kRows = rules::kTransposedFewRows, kMostStages = 6;
  static constexpr int kSlices = Weights::kCodeBytes < 8192 ? 4 : 2;
  static constexpr bool kWarps = true;
};
template <typename Weights>
struct TransposedRows192Sm90 : device::TransposedTraitsSm90<Weights> {
  static constexpr int kRows = rules::kMostQmmRows, kMostStages = 6, kCluster = 2, kSlices = 1;
  static constexpr bool kAdapters = Weights::kTakesAdapters;
};
// Tiles of float32 x, and weights that are not rounded.
template <typename Weights>
struct TransposedScaledRows8Sm90 : device::TransposedScaledTraitsSm90<Weights> {
  static constexpr int kRows = rules::kTransposedScaledFewRows, kMostStages = 6;
  static constexpr bool kWarps = true;
};
template <typename Weights>
struct TransposedScaledRows128Sm90 : device::TransposedScaledTraitsSm90<Weights> {
  static constexpr int kRows = rules::kTransposedScaledRows, kMostStages = 3, kCluster = 2;
};

template <typename Weights>
struct TransposedScaledLines8Sm90 : device::TransposedScaledLinesTraitsSm90<Weights> {
  static constexpr int kRows = rules::kTransposedScaledFewRows, kMostStages = 6;
};

template <typename Config>
cudaError_t LaunchTransposedConfigSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                       const OperandsSm90& operands) {
  GemmSm90& gemm = quantized.gemm;
  gemm.l_k_major = true;
  TensorMapSpec l = operands.l;
  l.box_lines = Config::kChunkL;
  if constexpr (Config::kWarps) {  // slices are matrices, so that a stage's are a box
    l.groups = l.inner / Config::kLineL;
    l.inner = l.group = l.box_inner = Config::kLineL;
    l.box_groups = Config::kSlices * (64 / Config::kLineL);
    l.box_lines = std::max(Config::kRows / 2, 8);  // whole swizzled pieces
    if (cudaError_t error = EncodeTensorMap(l, &gemm.rest_maps.l[0])) return error;
    l.box_lines = Config::kRows;
  }
  if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  quantized.unit = Config::Weights::kFactor;
  return LaunchTilesSm90<Config, device::TransposedGemmSm90Kernel<Config>>(stream, gemm, quantized);
}

template <typename Weights>
cudaError_t LaunchTransposedTilesSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                      const rules::QmmPlanSm90& plan,
                                      const OperandsSm90& operands) {
  const auto launch = [&](auto traits) {
    using Config = device::TransposedGemmSm90Config<decltype(traits)>;
    return LaunchTransposedConfigSm90<Config>(stream, quantized, operands);
  };
  if (plan.way == rules::QmmWay::kWarps) return launch(TransposedRows16Sm90<Weights>{});
  return launch(TransposedRows192Sm90<Weights>{});
}

template <Mode kMode, int kBits>
cudaError_t LaunchTransposedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                         const rules::QmmPlanSm90& plan,
                                         const OperandsSm90& operands) {
  using Format = FormatTraits<kMode, kBits>;
  constexpr bool kHasFloats =
      Format::kScale == ScaleType::kScaleAndBias || Format::kScale == ScaleType::kFloat32;
  if (quantized.packed.codes == nullptr) {
    if constexpr (kHasFloats && Format::kHasLinesSm90) {
      if (plan.way == rules::QmmWay::kScaled) {
        using Weights = device::TransposedScaledLines<kMode, kBits>;
        using Traits = TransposedScaledLines8Sm90<Weights>;
        using Config = device::TransposedScaledLinesSm90Config<Traits>;
        return LaunchTransposedConfigSm90<Config>(stream, quantized, operands);
      }
    }
    if (operands.dtype == DType::kF16) {
      if constexpr (Format::kHasLinesSm90) {
        using Half = device::TransposedLines<kMode, kBits, DType::kF16>;
        return LaunchTransposedTilesSm90<Half>(stream, quantized, plan, operands);
      }
    } else if constexpr (Format::kHasLinesSm90) {
      using Weights = device::TransposedLines<kMode, kBits>;
      return LaunchTransposedTilesSm90<Weights>(stream, quantized, plan, operands);
    }
    return cudaErrorInvalidValue;  // it has no kernel
  }
  if constexpr (kHasFloats) {
    if (plan.way == rules::QmmWay::kScaled) {
      const auto launch = [&](auto traits) {
        using Config = device::TransposedScaledSm90Config<decltype(traits)>;
        return LaunchTransposedConfigSm90<Config>(stream, quantized, operands);
      };
      using Weights = device::TransposedTiles<device::ScaledWeights<kMode, kBits>>;
      if (plan.tile == rules::kTransposedScaledFewRows) {
        return launch(TransposedScaledRows8Sm90<Weights>{});
      }
      return launch(TransposedScaledRows128Sm90<Weights>{});
    }
  }
  return DispatchHalfSm90(operands.dtype, [&](auto x) {
    using Weights = device::TransposedPacked<kMode, kBits, decltype(x)::value>;
    return LaunchTransposedTilesSm90<Weights>(stream, quantized, plan, operands);
  });
}

}  // namespace jgg

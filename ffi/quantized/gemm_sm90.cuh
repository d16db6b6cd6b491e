// Host side of the Hopper kernel of qmm: tile shapes, choice between them, launch.
#pragma once

#include "grouped_mm/gemm_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/linear_weights_sm90.cuh"
#include "quantized/device/packed_weights_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg {

// In how many parts to take a tile's k: two where all blocks would run at a time on an H200 and
// each has enough to do. Handing sums over took about as long as 15 slices.
template <typename Config>
int PartsSm90(const GemmSm90& gemm) {
  if constexpr (!Config::kSharesK) return 1;
  const int64_t segments = std::min<int64_t>(gemm.metadata.count, gemm.rows_y);
  const int64_t tiles = segments * ((gemm.n + 127) / 128), slices = (gemm.k + 63) / 64;
  constexpr int64_t kAtATime = kH200Processors * Config::kBlocksPerSm;
  static_assert(kMostParts == 2);
  return 2 * tiles <= kAtATime && slices >= 64 ? 2 : 1;
}

template <typename Config>
cudaError_t LaunchQuantizedConfigSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                      const OperandsSm90& operands) {
  GemmSm90& gemm = quantized.gemm;
  gemm.l_k_major = true;
  TensorMapSpec l = operands.l;
  l.box_lines = Config::kChunkL;
  if constexpr (Config::kCopiesStages) {  // slices of k are matrices, so that a stage's are a box
    l.groups = l.inner / 64;
    l.inner = l.group = 64;
    for (int i = 0; i < 2; ++i) {
      l.box_lines = (Config::kRows / 4) << i;
      l.box_groups = Config::StageSlices(l.box_lines);
      if (cudaError_t error = EncodeTensorMap(l, &gemm.l_rest[i])) return error;
    }
    l.box_lines = Config::kRows;
    l.box_groups = Config::StageSlices(l.box_lines);
  }
  if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  gemm.parts = PartsSm90<Config>(gemm);
  using Weights = typename Config::Weights;
  quantized.asks_for_small = Config::kHasSmall && Weights::AsksForSmall(quantized);
  quantized.unit = quantized.asks_for_small ? Weights::kSmallFactor : Weights::kFactor;
  return LaunchTilesSm90<Config, device::QuantizedGemmSm90Kernel<Config>>(stream, gemm, quantized);
}

// Tiles of 32 rows. Up to 8 rows warps multiply by themselves.
template <typename Weights, int kBlocks, int kMostStages, int kBlocksPerSm>
cudaError_t LaunchFewRowsSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                              const OperandsSm90& operands) {
  using device::QuantizedGemmSm90Config;
  if constexpr (!Weights::kAlwaysWarps) {
    if (TypicalRowsSm90(quantized.gemm) > 8) {
      return LaunchQuantizedConfigSm90<
          QuantizedGemmSm90Config<Weights, 32, kBlocks, kMostStages, 1, kBlocksPerSm>>(
          stream, quantized, operands);
    }
  }
  return LaunchQuantizedConfigSm90<
      QuantizedGemmSm90Config<Weights, 32, kBlocks, kMostStages, 1, kBlocksPerSm, true>>(
      stream, quantized, operands);
}

// Rows of a tile: 32 or 64 where there are few, so that many stages of weights are under way. A
// segment that has more than a tile decodes its weights again, so tiles are larger than the
// average.
template <typename Weights>
cudaError_t LaunchQuantizedTilesSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  using device::QuantizedGemmSm90Config;
  const int64_t rows = TypicalRowsSm90(quantized.gemm);
  if (IsGated(quantized.gemm.epilogue.activation)) {
    if (rows <= 24) return LaunchFewRowsSm90<Weights, 2, 7, 1>(stream, quantized, operands);
    return LaunchQuantizedConfigSm90<QuantizedGemmSm90Config<Weights, 96, 2, 4, 1>>(
        stream, quantized, operands);
  }
  if (rows <= 24) {
    return LaunchFewRowsSm90<Weights, 1, 8, Weights::kBlocksPerSm>(stream, quantized, operands);
  }
  if (rows <= 52) {
    return LaunchQuantizedConfigSm90<
        QuantizedGemmSm90Config<Weights, 64, 1, 7, 1, Weights::kBlocksOf64>>(stream, quantized,
                                                                             operands);
  }
  if (rows <= 104) {
    return LaunchQuantizedConfigSm90<QuantizedGemmSm90Config<Weights, 128, 1, 4, 2>>(
        stream, quantized, operands);
  }
  return LaunchQuantizedConfigSm90<QuantizedGemmSm90Config<Weights, Weights::kMostRows, 1, 4, 2>>(
      stream, quantized, operands);
}

template <Mode kMode, int kBits>
cudaError_t LaunchPackedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  return LaunchQuantizedTilesSm90<device::PackedWeights<kMode, kBits>>(stream, quantized, operands);
}

template <Mode kMode, int kBits>
cudaError_t LaunchLinearInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  return LaunchQuantizedTilesSm90<device::LinearWeights<kMode, kBits>>(stream, quantized, operands);
}

}  // namespace jgg

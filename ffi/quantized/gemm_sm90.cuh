// Host side of the Hopper kernel of qmm: tile shapes, choice between them, launch.
#pragma once

#include <algorithm>

#include "grouped_mm/gemm_sm90.cuh"
#include "quantized/device/direct_epilogue_sm90.cuh"
#include "quantized/device/direct_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/linear_weights_sm90.cuh"
#include "quantized/device/packed_weights_sm90.cuh"
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
};
template <typename Weights>
struct QuantizedMostRowsSm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = Weights::kMostRows, kMostStages = 4, kCluster = 2;
};

template <typename Weights>
struct QuantizedGatedRows32Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 32, kBlocks = 2, kMostStages = 7;
};
template <typename Weights>
struct QuantizedGatedRows96Sm90 : device::QuantizedTraitsSm90<Weights> {
  static constexpr int kRows = 96, kBlocks = 2, kMostStages = 4;
};

// A tile of few rows that warps multiply by themselves. tools/check_sass.py knows it by this name.
template <typename Traits>
struct ByWarpsSm90 : Traits {
  static constexpr bool kWarps = true;
};

// In how many parts to take a tile's k: two where all blocks would run at a time on an H200 and
// each has enough to do. Handing sums over took about as long as 15 slices.
template <typename Config>
int ChoosePartsSm90(const GemmSm90& gemm) {
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
      if (cudaError_t error = EncodeTensorMap(l, &gemm.rest_maps.l[i])) return error;
    }
    l.box_lines = Config::kRows;
    l.box_groups = Config::StageSlices(l.box_lines);
  }
  if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  gemm.parts = ChoosePartsSm90<Config>(gemm);
  using Weights = typename Config::Weights;
  quantized.asks_for_small = Config::kHasSmall && Weights::AsksForSmall(quantized);
  quantized.unit = quantized.asks_for_small ? Weights::kSmallFactor : Weights::kFactor;
  return LaunchTilesSm90<Config, device::QuantizedGemmSm90Kernel<Config>>(stream, gemm, quantized);
}

// Tiles of 32 rows. Up to 8 rows warps multiply by themselves.
template <typename Traits>
cudaError_t LaunchFewRowsSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                              const OperandsSm90& operands) {
  using device::QuantizedGemmSm90Config;
  if constexpr (!Traits::Weights::kAlwaysWarps) {
    if (TypicalRowsSm90(quantized.gemm) > 8) {
      return LaunchQuantizedConfigSm90<QuantizedGemmSm90Config<Traits>>(stream, quantized,
                                                                        operands);
    }
  }
  return LaunchQuantizedConfigSm90<QuantizedGemmSm90Config<ByWarpsSm90<Traits>>>(stream, quantized,
                                                                                 operands);
}

// Rows of a tile: 32 or 64 where there are few, so that many stages of weights are under way. A
// segment that has more than a tile decodes its weights again, so tiles are larger than the
// average.
template <typename Weights>
cudaError_t LaunchQuantizedTilesSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  const auto launch = [&](auto traits) {
    using Config = device::QuantizedGemmSm90Config<decltype(traits)>;
    return LaunchQuantizedConfigSm90<Config>(stream, quantized, operands);
  };
  const int64_t rows = TypicalRowsSm90(quantized.gemm);
  if (IsGated(quantized.gemm.epilogue.activation)) {
    using FewRows = QuantizedGatedRows32Sm90<Weights>;
    if (rows <= 24) return LaunchFewRowsSm90<FewRows>(stream, quantized, operands);
    return launch(QuantizedGatedRows96Sm90<Weights>{});
  }
  using FewRows = QuantizedRows32Sm90<Weights>;
  if (rows <= 24) return LaunchFewRowsSm90<FewRows>(stream, quantized, operands);
  if (rows <= 52) return launch(QuantizedRows64Sm90<Weights>{});
  if (rows <= 104) return launch(QuantizedRows128Sm90<Weights>{});
  return launch(QuantizedMostRowsSm90<Weights>{});
}

// Every block looks for its row's group, 128 at a time.
constexpr int64_t kMostDirectGroups = 512;
// It reads so many weights at most. With more of them, the kernel of tiles is faster (docs/lab).
constexpr int64_t kMostDirectWeights = 1 << 24;

// Rows of all groups, and of one matrix without an offset.
constexpr int64_t kMostDirectRows = 16, kMostDirectMatrixRows = 96;
// So many blocks keep an H100 busy.
constexpr int64_t kManyDirectBlocks = 256;

inline int64_t DirectRowTiles(int64_t rows, int eights) {
  const int64_t of_block = eights * device::kDirectRows;
  return (rows + of_block - 1) / of_block;
}

// Whether the kernel without tiles is faster for rows of one matrix: it reads the weights for every
// 16 of them, and a tile takes as long as its k. Fitted to an H100 (docs/lab/prepacked.md).
inline bool IsDirectMatrixSm90(int64_t rows, int64_t n, int64_t k) {
  if (rows <= device::kDirectRows) return true;
  return rows <= kMostDirectMatrixRows && DirectRowTiles(rows, 2) * n * k <= (7 + k / 64) << 20;
}

// Whether the kernel without tiles takes a product: one of few rows in all, and of each group.
inline bool IsDirectSm90(const GemmSm90& gemm) {
  const Metadata& metadata = gemm.metadata;
  const Epilogue& epilogue = gemm.epilogue;
  const int64_t rows = gemm.rows_y, count = metadata.count;
  const bool few = metadata.HasEntryOfEach(1)
                       ? IsDirectMatrixSm90(rows, gemm.n, gemm.k)
                       : rows <= (count == 1 ? device::kDirectRows : kMostDirectRows);
  return few && metadata.kind == MetadataKind::kSizes && count <= kMostDirectGroups &&
         gemm.rows_x == rows &&
         std::min<int64_t>(rows, count) * gemm.n * gemm.k <= kMostDirectWeights &&
         !epilogue.accumulate && !epilogue.HasPreactivation();
}

template <typename Weights, bool kGated, int kEights, bool kPairs = false>
cudaError_t LaunchDirectConfigSm90(cudaStream_t stream, const device::DirectGemmSm90& direct,
                                   bool alone) {
  const auto columns = static_cast<unsigned>(kGated || kPairs ? direct.n / 2 : direct.n);
  const auto rows =
      static_cast<unsigned>(alone ? DirectRowTiles(direct.rows, kEights) : direct.rows);
  if (rows == 0 || columns == 0) return cudaSuccess;
  device::DirectGemmSm90Kernel<Weights, kGated, device::DirectEpilogue, kEights, kPairs>
      <<<dim3{columns / 16, rows}, 32 * device::kDirectWarps, 0, stream>>>(direct);
  return cudaGetLastError();
}

template <typename Weights>
cudaError_t LaunchDirectSm90(cudaStream_t stream, const QuantizedGemmSm90& quantized,
                             const OperandsSm90& operands) {
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
  if (!alone || direct.rows <= device::kDirectRows) {
    return gated ? LaunchDirectConfigSm90<Weights, true, 1>(stream, direct, alone)
                 : LaunchDirectConfigSm90<Weights, false, 1>(stream, direct, alone);
  }
  if (gated) return LaunchDirectConfigSm90<Weights, true, 2>(stream, direct, alone);
  // Pairs read x half as often.
  const int64_t blocks = direct.n / 32 * DirectRowTiles(direct.rows, 2);
  return direct.n % 128 == 0 && blocks >= kManyDirectBlocks
             ? LaunchDirectConfigSm90<Weights, false, 2, true>(stream, direct, alone)
             : LaunchDirectConfigSm90<Weights, false, 2>(stream, direct, alone);
}

template <Mode kMode, int kBits>
cudaError_t LaunchPackedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  using Weights = device::PackedWeights<kMode, kBits>;
  if (IsDirectSm90(quantized.gemm)) return LaunchDirectSm90<Weights>(stream, quantized, operands);
  return LaunchQuantizedTilesSm90<Weights>(stream, quantized, operands);
}

template <Mode kMode, int kBits>
cudaError_t LaunchLinearInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                     const OperandsSm90& operands) {
  if constexpr (FormatTraits<kMode, kBits>::kIsLinear) {
    using Weights = device::LinearWeights<kMode, kBits>;
    return LaunchQuantizedTilesSm90<Weights>(stream, quantized, operands);
  } else {
    return cudaErrorInvalidValue;  // it has no kernel
  }
}

}  // namespace jgg

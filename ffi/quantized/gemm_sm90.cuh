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
      if (cudaError_t error = EncodeTensorMap(l, &gemm.l_rest[i])) return error;
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

// Whether the kernel without tiles takes a product: one of few rows in all, and of each group.
inline bool IsDirectSm90(const GemmSm90& gemm) {
  const Metadata& metadata = gemm.metadata;
  const Epilogue& epilogue = gemm.epilogue;
  const int64_t most = metadata.count == 1 ? device::kDirectRows : 16;
  return metadata.kind == MetadataKind::kSizes && metadata.count <= kMostDirectGroups &&
         gemm.rows_x == gemm.rows_y && gemm.rows_y <= most &&
         std::min<int64_t>(gemm.rows_y, metadata.count) * gemm.n * gemm.k <= kMostDirectWeights &&
         !epilogue.accumulate && !epilogue.HasPreactivation();
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
  const bool gated = IsGated(gemm.epilogue.activation);
  const bool alone = gemm.metadata.count == 1 && gemm.metadata.offset == nullptr;
  const unsigned columns = gated ? gemm.n / 2 : gemm.n, rows = gemm.rows_y;
  const dim3 blocks{columns / 16,
                    alone ? (rows + device::kDirectRows - 1) / device::kDirectRows : rows};
  if (rows == 0 || columns == 0) return cudaSuccess;
  constexpr int kThreads = 32 * device::kDirectWarps;
  using device::DirectEpilogue, device::DirectGemmSm90Kernel;
  if (gated) {
    DirectGemmSm90Kernel<Weights, true, DirectEpilogue><<<blocks, kThreads, 0, stream>>>(direct);
  } else {
    DirectGemmSm90Kernel<Weights, false, DirectEpilogue><<<blocks, kThreads, 0, stream>>>(direct);
  }
  return cudaGetLastError();
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
  if constexpr (kMode == Mode::kFp8) {
    return cudaErrorInvalidValue;  // it has no kernel
  } else {
    using Weights = device::LinearWeights<kMode, kBits>;
    return LaunchQuantizedTilesSm90<Weights>(stream, quantized, operands);
  }
}

}  // namespace jgg

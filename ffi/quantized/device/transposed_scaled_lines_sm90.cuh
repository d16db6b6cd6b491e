// As transposed_scaled_sm90.cuh, few rows of float32 x, of weights in layout "linear": a slice has
// codes of 64 lines (n) and 128 k, by TMA, and scales that two warps bring in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized/device/scaled_x_lines.cuh"
#include "quantized/device/staged_floats_sm90.cuh"
#include "quantized/device/transposed_lines_sm90.cuh"
#include "quantized/device/transposed_sm90.cuh"

namespace jgg::device {

template <Mode kMode_, int kBits_>
struct TransposedScaledLines : TransposedLines<kMode_, kBits_>,
                               HalfLines<LineCodes<kMode_, kBits_>> {
  using Lines = HalfLines<LineCodes<kMode_, kBits_>>;
  using Lines::ColumnOf, Lines::kSecondColumn;
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
  static constexpr bool kScaled = true, kStagesScales = true;
  static constexpr float kFactor = 1;
  using Staged = StagedFloats<LineCodes<kMode, kBits>>;
};

template <typename Config>
struct TransposedScaledFewLines {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  static constexpr int kBlockSums = 8;  // for 16 rows, as the epilogue has them
  using Sums = float[kBlockSums];

  // As TransposedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    const auto multiply = [&](auto groups) {
      if (work.rows <= 2) {
        MultiplySlices<groups.value, true>(quantized, memory, work, group, at, sums);
      } else {
        MultiplySlices<groups.value, false>(quantized, memory, work, group, at, sums);
      }
    };
    if constexpr (Weights::Codes::kHasBiases) {
      if (Weights::Staged::Groups(quantized) == 4) return multiply(Constant<2>{});
    }
    multiply(Constant<1>{});
  }

 private:
  template <int kGroups, bool kFew, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& result) {
    using Product = ScaledXLinesProduct<Weights::kMode, Weights::kBits, kGroups, kFew>;
    static_assert(Config::kRows == Product::kRows && Product::kFewRows == 2);
    Product product;
    const int scales = Weights::Staged::First(quantized, group);
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      Wait(&memory.full[at.index], at.parity);
      uint32_t read = 0;
#pragma unroll(kFew&& kGroups == 1 ? Config::kSlices : 1)
      for (int s = 0; s < Config::kSlices; ++s) {
        read |=
            product.Multiply(memory.l[at.index] + s * 2 * Product::kBoxBytes,
                             memory.codes[at.index][s], memory.scales[at.index][s] + scales, group);
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
    AddTransposedWarps<1>(memory.staged[group], group, product.Finish(), result);
    Product::AddPlanes(result);
  }
};

// Traits of a tile derive from this.
template <typename Weights_>
struct TransposedScaledLinesTraitsSm90 : LoaderSm90, ProductsSm90, StoreSm90 {
  using Weights = Weights_;  // TransposedScaledLines
  static constexpr bool kWarps = true, kAdapters = false;
};

template <typename Traits>
struct TransposedScaledLinesSm90Config : Traits {
  using Traits::kRows, Traits::kMostStages;
  using typename Traits::Weights;
  static constexpr int kBlocks = 1, kScheduledBlocks = 1, kBlocksPerSm = 2;
  static constexpr int kFeedRegisters = 48, kMultiplyRegisters = 96;
  static constexpr int kThreads = 384, kWorks = 4, kSlices = 2;
  static constexpr int kLineL = 32;  // n of a line of 128 bytes
  static constexpr int kChunkL = kRows;
  static constexpr int kSliceBytesL = 2 * kRows * 128;
  static constexpr int kCodeBytes = Weights::kCodeBytes, kScaleBytes = Weights::Staged::kBytes;
  using Epilogue = EpilogueSm90<32, false, true>;
  static constexpr int kStageBytes = kSlices * (kSliceBytesL + kCodeBytes + kScaleBytes);
  static constexpr int kFree = 228 * 1024 / kBlocksPerSm - 1024 - 2 * 1024 - 2 * Epilogue::kBytes;
  static constexpr int kStages = std::min(kFree / kStageBytes, kMostStages);
  static_assert(kStages >= 2);
  template <typename Config>
  using ScaledProducts = TransposedScaledFewLines<Config>;

  struct SharedMemory {
    alignas(1024) char l[kStages][kSlices * kSliceBytesL];
    alignas(Weights::kCodesAligned) char codes[kStages][kSlices][kCodeBytes];
    alignas(128) char scales[kStages][kSlices][kScaleBytes];
    alignas(1024) char staged[2][Epilogue::kBytes];  // for sums of warps
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
  };
};

}  // namespace jgg::device

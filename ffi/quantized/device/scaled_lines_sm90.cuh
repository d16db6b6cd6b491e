// The kernel of scaled_lines.cuh: tiles of at most 8 rows of x, which warps multiply as in
// few_rows_sm90.cuh.
#pragma once

#include <cstdint>

#include "quantized/device/few_rows_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/linear_weights_sm90.cuh"
#include "quantized/device/scaled_lines.cuh"

namespace jgg::device {

template <typename Config>
struct ScaledLinesProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  static constexpr int kBlockSums = Config::kRows / 2;
  static_assert(Config::kRows == kScaledLinesRows && Config::kBlocks == 1);
  using Sums = float[1][kBlockSums];

  // As QuantizedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    const auto loops = [&](auto floats) {
      if (work.rows <= 4) {
        MultiplySlices<2, floats.value>(quantized, memory, work, group, at, sums[0]);
      } else {
        MultiplySlices<4, floats.value>(quantized, memory, work, group, at, sums[0]);
      }
    };
    if (quantized.packed.float_scales) {
      loops(std::integral_constant<PackedFloats, PackedFloats::k32Bits>{});
    } else {
      loops(std::integral_constant<PackedFloats, PackedFloats::k16Bits>{});
    }
  }

 private:
  template <int kPairs, PackedFloats kFloats, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at,
                                        float (&sums)[kBlockSums]) {
    constexpr int kAhead = Config::kSlices / 2;
    using Product = ScaledLinesProduct<QuantizedGemmSm90, Weights::kBits, kPairs, kFloats, kAhead>;
    Product product(quantized, quantized.gemm.n, work.weight, work.out_column + 64 * group,
                    work.l_k);
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      Wait(&memory.full[at.index], at.parity);
      uint32_t read = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i > 0 && slice + 2 * i >= work.slices) break;
        read |= product.Multiply(memory.l[at.index] + 2 * i * Product::kSliceBytes,
                                 &memory.x_sums[at.index][i][0].x,
                                 memory.codes[at.index][0][group] + i * Weights::kCodeBytes, i);
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
    product.Finish(sums);
#pragma unroll
    for (int i = 4 * Product::kEights; i < kBlockSums; ++i) sums[i] = 0.0f;
  }
};

template <int kBits_>
struct ScaledLines : LinearWeights<Mode::kAffine, kBits_> {
  static constexpr int kBits = kBits_;
  static constexpr bool kScaled = true, kHasSmall = false, kHasXSums = true;
  static constexpr float kFactor = 1, kSmallFactor = 1;
  static constexpr int kBlocksPerSm = 1;  // sums of 32 k need registers
  template <typename Config>
  using RowsProducts = ScaledLinesProducts<Config>;
};

// Its traits have kRows = 32, which boxes of x follow from; its tiles have 8.
template <typename Traits>
struct ScaledLinesSm90Config : QuantizedGemmSm90Config<Traits> {
  using Base = QuantizedGemmSm90Config<Traits>;
  static constexpr int kRows = kScaledLinesRows;
  static_assert(Base::BoxRows(kRows) == kRows);

  struct SharedMemory : Base::SharedMemory {
    float4 x_sums[Base::kStages][Base::kSlices / 2][kRows];
  };
};

}  // namespace jgg::device

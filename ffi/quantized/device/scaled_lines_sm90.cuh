// The kernel of scaled_lines.cuh: tiles of at most 8 rows of x, which warps multiply as in
// few_rows_sm90.cuh. Or of two rows of float32: two warps that do not multiply make those 8 rows of
// them, and sums of x, once for each tile. By XLA this took a fifth of the time.
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
  static constexpr int kBlockSums = kScaledLinesRows / 2;
  static_assert(Config::kBlocks == 1);
  using Sums = float[1][kBlockSums];

  // As QuantizedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    const auto loops = [&](auto floats) {
      const auto loop = [&](auto share, auto count) {
        MultiplySlices<share.value, count.value, floats.value>(quantized, memory, work, group, at,
                                                               sums[0]);
      };
      const bool small = quantized.scale_shift == 5;  // groups of 32 k
      if (work.rows <= (Weights::kFloats ? 1 : 4)) {
        small ? loop(Constant<1>{}, Constant<2>{}) : loop(Constant<2>{}, Constant<1>{});
      } else {
        small ? loop(Constant<1>{}, Constant<4>{}) : loop(Constant<2>{}, Constant<2>{});
      }
    };
    if (quantized.packed.float_scales) {
      loops(std::integral_constant<PackedFloats, PackedFloats::k32Bits>{});
    } else {
      loops(std::integral_constant<PackedFloats, PackedFloats::k16Bits>{});
    }
  }

 private:
  template <int kShare, int kCount, PackedFloats kFloats, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at,
                                        float (&sums)[kBlockSums]) {
    constexpr int kAhead = Config::kSlices / 2;
    using Product =
        ScaledLinesProduct<QuantizedGemmSm90, Weights::kBits, kShare, kCount, kFloats, kAhead>;
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
    if constexpr (Weights::kFloats) AddPlanesOfRows(sums);
  }
};

template <int kBits_>
struct ScaledLines : LinearWeights<Mode::kAffine, kBits_> {
  static constexpr int kBits = kBits_;
  static constexpr bool kScaled = true, kHasSmall = false, kHasXSums = true, kFloats = false;
  static constexpr float kFactor = 1, kSmallFactor = 1;
  static constexpr int kBlocksPerSm = 1;  // sums of 32 k need registers
  template <typename Config>
  using RowsProducts = ScaledLinesProducts<Config>;
};

// Beside float32 rows.
template <int kBits>
struct FloatLines : ScaledLines<kBits> {
  static constexpr bool kFloats = true;
  static constexpr int kRowWarps = 2;

  // Warp `warp` of kRowWarps, which has one row of a tile, or none.
  template <typename Config>
  __device__ static void MakeRows(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int warp) {
    using Planes = OrderedPlanes<kBits>;
    constexpr int kSlices = Config::kSlices;
    static_assert(kSlices <= 4 && kFloatLinesRows <= kRowWarps);
    // A lane has a piece of one of a stage's 128 k.
    const int lane = threadIdx.x % 32, at_k = lane / 16, piece = lane % 16;
    Place<Config::kStages> at;
    ForEachWork<Config>(memory, [&](const Work& work) {
      const bool exists = warp < work.rows && at_k < kSlices / 2;
      const int64_t line = work.l_row + warp;
      int k = work.l_k + 128 * at_k + Planes::First(piece);
      const float* from = quantized.x + line * quantized.elements + k;
      float4 next[2];
      const auto load = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int further = i * Planes::kSecondFour;
          next[i] = make_float4(0, 0, 0, 0);
          if (exists && k + further < quantized.elements) {
            next[i] = __ldg(reinterpret_cast<const float4*>(from + further));
          }
        }
        from += 64 * kSlices;
        k += 64 * kSlices;
      };
      load();
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += kSlices) {
        const float eight[8] = {next[0].x, next[0].y, next[0].z, next[0].w,
                                next[1].x, next[1].y, next[1].z, next[1].w};
        load();
        uint32_t planes[kValuePlanes][4];
        Planes::Make(eight, planes);
        float sum = 0;
#pragma unroll
        for (float value : eight) sum += value;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        Wait(&memory.empty[at.index], at.parity ^ 1);
        if (exists) {
          const int row = kRowsOfFloat * warp;
          char* to = memory.l[at.index] + 2 * at_k * kScaledLinesRows * 128;
#pragma unroll
          for (int i = 0; i < kValuePlanes; ++i) {
            StoreWords<4>(to + Planes::PlaceOf(piece, row + i), planes[i]);
          }
          // Biases multiply the sum of all planes once.
          float* sums = &memory.x_sums[at.index][at_k][row + piece % 4].x;
          sums[piece / 4] = piece % 4 == 0 ? sum : 0.0f;
        }
        __syncwarp();
        ArriveFor(&memory.full[at.index]);
        at.Next();
      }
    });
  }
};

// Its traits have kRows = 32, which boxes of x follow from; its tiles have 8, or 2 of float32.
template <typename Traits>
struct ScaledLinesSm90Config : QuantizedGemmSm90Config<Traits> {
  using Base = QuantizedGemmSm90Config<Traits>;
  static constexpr int kRows = Traits::Weights::kFloats ? kFloatLinesRows : kScaledLinesRows;
  static_assert(Base::BoxRows(kRows) == kScaledLinesRows);

  struct SharedMemory : Base::SharedMemory {
    float4 x_sums[Base::kStages][Base::kSlices / 2][kScaledLinesRows];
  };
};

}  // namespace jgg::device

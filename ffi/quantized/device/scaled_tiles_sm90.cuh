// Tiles of 64 rows of weights that are not rounded, by WGMMA. x has one plane, or three that lie
// beside each other, bfloat16 numbers that sum to it: products with all of them are one sum before
// scales multiply it. What biases multiply comes with the call: float32 sums of x, of 16 or 32 k.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/scaled_rows_sm90.cuh"

namespace jgg::device {

// Its traits derive from this.
template <typename Weights>
struct ScaledTraitsSm90 : QuantizedTraitsSm90<Weights> {
  static constexpr bool kHasXSums = Weights::Codes::kHasBiases;
  static constexpr int kRows = rules::kScaledTileRows, kMostPlanes = 3;
  static constexpr int kMoreBytes = kHasXSums ? 2 * kRows * static_cast<int>(sizeof(float4)) : 0;
};

template <bool kHas, int kStages, int kRows>
struct StagesOfXSums {
  float4 x_sums[kStages][2][kRows];  // of 64 k each, or the first of 128 k
};
template <int kStages, int kRows>
struct StagesOfXSums<false, kStages, kRows> {};

template <typename Traits>
struct ScaledGemmSm90Config : QuantizedGemmSm90Config<Traits> {
  using Base = QuantizedGemmSm90Config<Traits>;

  struct SharedMemory : Base::SharedMemory,
                        StagesOfXSums<Traits::kHasXSums, Base::kStages, Traits::kRows> {};
};

// One thread copies x, and its sums.
template <typename Config>
__device__ void CopyPlanesThread(const QuantizedGemmSm90& quantized,
                                 typename Config::SharedMemory& memory, int block) {
  constexpr bool kPair = Config::kCluster == 2;
  const GemmSm90& gemm = quantized.gemm;
  const int shared_columns = SharedColumns<Config>(gemm), planes = quantized.planes;
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const bool shares = work.out_column < shared_columns;
    const int sum_bytes = work.rows * static_cast<int>(sizeof(float4));
    const int sums = !Config::kHasXSums ? 0 : quantized.packed.tile_groups == 4 ? 2 : 1;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, Config::kSlices * planes * Config::kChunkBytesL + sums * sum_bytes);
#pragma unroll 1
      for (int i = 0; i < Config::kSlices * planes; ++i) {
        const int s = i % Config::kSlices, plane = i / Config::kSlices;
        char* to = memory.l[at.index] + (s * Config::kMostPlanes + plane) * Config::kChunkBytesL;
        const int k = (slice + s) * kSliceSm90;
        if (!shares) {
          CopyBox<false>(&gemm.l_map, full, to, k, work.l_row, plane);
        } else if (i % 2 == block) {
          CopyBox<kPair>(&gemm.l_map, full, to, k, work.l_row, plane);
        }
      }
      if constexpr (Config::kHasXSums) {
        const float4* from = quantized.x_sums + work.l_row;
        for (int i = 0; i < sums; ++i) {
          const int64_t first = (int64_t{slice} / 2 * sums + i) * gemm.rows_x;
          CopyBytes(from + first, full, memory.x_sums[at.index][i], sum_bytes);
        }
      }
      at.Next();
    }
  });
}

template <typename Config>
struct ScaledTilesProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  using Codes = typename Weights::Codes;
  static constexpr int kBlockSums = Config::kRows / 2;
  static_assert(Config::kRows == 64 && Config::kBlocks == 1 && Config::kSlices == 2);
  using Sums = float[1][kBlockSums];

  // As QuantizedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlockSums; ++i) sums[0][i] = 0.0f;
    if (work.slices == 0) return;
    // A branch between products of one sum would end what is under way.
    const auto loop = [&](auto planes, auto steps) {
      MultiplySlices<planes.value, steps.value>(quantized, memory, work, group, at, sums[0]);
    };
    const bool three = quantized.planes == 3;
    if constexpr (Codes::kHasBiases) {
      if (quantized.packed.tile_groups == 4) {
        return three ? loop(Constant<3>{}, Constant<1>{}) : loop(Constant<1>{}, Constant<1>{});
      }
    }
    return three ? loop(Constant<3>{}, Constant<2>{}) : loop(Constant<1>{}, Constant<2>{});
  }

 private:
  // A sum's factor, and that of the sum of x, for a thread's two columns.
  struct Scales {
    float scale[2], bias[2];
  };

  // Sums are of kSteps x 16 k. One is made while the one before is added, and the codes of the next
  // are read. At the end of a stage nothing goes on: the other warpgroup has work then.
  template <int kPlanes, int kSteps, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, float* sums) {
    constexpr int kUnits = 4 / kSteps;  // of a slice
    const typename Weights::Reader reader(quantized.packed);
    const int slices = Uniform(work.slices);
    Stage here{Uniform(at.index), Uniform(at.parity)};
    const uint64_t l_first = WholeDescriptor(TileDescriptor(SharedAddress(memory.l), 64 * 128));
    uint32_t a[2][4 * kSteps], words[Weights::kWords];
    float products[2][kBlockSums];
    Scales scales[2];
#pragma unroll 1
    for (int slice = 0; slice < slices; slice += 2) {
      Wait(&memory.full[here.index], here.parity);
      const uint64_t l_stage = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const char* const stage_scales = memory.scales[here.index][0][group];
      uint32_t read = 0;
#pragma unroll
      for (int unit = 0; unit < 2 * kUnits; ++unit) {
        const int s = unit / kUnits, step = unit % kUnits * kSteps, which = unit % 2;
        if (step == 0) reader.Load(memory.codes[here.index][0][group], s, words);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) Codes::Numbers(words, step + i, a[which] + 4 * i);
        read |= reader.Scales(stage_scales, s, step, scales[which].scale, scales[which].bias);
        const int x_bytes = s * Config::kMostPlanes * Config::kChunkBytesL + step * 32;
        WarpgroupArrive();
        MultiplyPlanes<kPlanes, kSteps>(a[which], l_stage + (x_bytes >> 4), products[which]);
        WarpgroupCommit();
        if (unit == 0) continue;
        WarpgroupWait<1>();
        read |= Add(memory, here.index, unit - 1, scales[1 - which], products[1 - which], sums);
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[1 - which][i])::"memory");
      }
      WarpgroupWait<0>();
      read |= Add(memory, here.index, 2 * kUnits - 1, scales[1], products[1], sums);
      Release<Config>(memory, here.index + ZeroAfter(read));
      here.Next();
    }
    at = here;
  }

  template <int kPlanes, int kSteps>
  __device__ static void MultiplyPlanes(const uint32_t (&a)[4 * kSteps], uint64_t l,
                                        float (&products)[kBlockSums]) {
#pragma unroll
    for (int i = 0; i < kSteps * kPlanes; ++i) {
      const int plane = i / kSteps, step = i % kSteps;
      MultiplyRegisters<Config::kRows, DType::kBF16>(
          a + 4 * step, l + ((plane * Config::kChunkBytesL + step * 32) >> 4), products, i > 0,
          std::make_index_sequence<kBlockSums>{});
    }
  }

  // Scales a unit's sums, and adds them. The result is some of the bits that it read.
  __device__ static uint32_t Add(const Memory& memory, int stage, int unit, const Scales& by,
                                 const float (&products)[kBlockSums], float* sums) {
    uint32_t read = 0;
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockSums; ++i) {
      const int of = i / 2 % 2;
      sums[i] += by.scale[of] * products[i];
      if constexpr (Codes::kHasBiases) {
        const int row = first + i / 4 * 8 + i % 2;
        const auto* four = reinterpret_cast<const float*>(&memory.x_sums[stage][unit / 4][row]);
        const float x = four[unit % 4];
        sums[i] += by.bias[of] * x;
        read |= AsBits(x);
      }
    }
    return read;
  }
};

template <typename Config>
struct PartsOf<Config, true, false> {
  using Products = ScaledTilesProducts<Config>;

  __device__ static void CopyRows(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int block) {
    CopyPlanesThread<Config>(quantized, memory, block);
  }
};

}  // namespace jgg::device

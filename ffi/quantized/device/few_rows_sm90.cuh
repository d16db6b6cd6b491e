// Tiles of 16 or 32 rows: their sums, sums of parts of k, and plain results. Each warp multiplies
// its 16 columns by mma.sync. WGMMA would make the four warps of a warpgroup wait for each other
// every few instructions, and decoding, which is what takes the time here, leaves registers for
// nothing that is under way.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/registers_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

template <typename Config>
struct FewRowsProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  static constexpr int kBlocks = Config::kBlocks, kBlockSums = Config::kRows / 2;
  static_assert(Config::kRows == 16 || Config::kRows == 32);
  // Units of sums, those of kAny in those of kSmall.
  static constexpr float kUnit = Config::kHasSmall ? Weights::kFactor / Weights::kSmallFactor : 1;
  using Sums = float[kBlocks][kBlockSums];
  using AnyScales = std::integral_constant<ScaleRange, ScaleRange::kAny>;
  using SmallScales = std::integral_constant<ScaleRange, ScaleRange::kSmall>;

  // As QuantizedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlocks * kBlockSums; ++i) sums[i / kBlockSums][i % kBlockSums] = 0.0f;
    const auto loops = [&](auto asks) {
      constexpr bool kAsks = Config::kHasSmall && asks.value;
      if (work.rows <= 8) {
        MultiplySlices<1, kAsks>(quantized, memory, work, group, at, sums);
      } else if (Config::kRows == 16 || work.rows <= 16) {
        MultiplySlices<2, kAsks>(quantized, memory, work, group, at, sums);
      } else if constexpr (Config::kRows == 32) {  // affine codes would spill
        MultiplySlices<4, kAsks && kUnit == 1>(quantized, memory, work, group, at, sums);
        if (kAsks) Multiply<4>(sums, kUnit);
      }
    };
    if constexpr (kUnit != 1) {
      if (!quantized.asks_for_small) return loops(std::false_type{});
    }
    loops(std::true_type{});
  }

 private:
  // With 8 rows products alternate between two sums, since each waits for the one before.
  static constexpr int Chains(int eights) { return eights == 1 ? 2 : 1; }

  // kEights of rows. kAsks: sums are in kSmall's unit.
  template <int kEights, bool kAsks, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& sums) {
    constexpr int kSlices = Config::StageSlices(8 * kEights);
    using Reader = typename Config::Weights::template Reader<kSlices>;
    const int column = work.out_column + 64 * group;
    Reader first_block(quantized, work, column);
    Reader second_block(quantized, work, column + quantized.gemm.n / 2);
    // A lane's row of x and, swizzled by it, piece of 8 k, of the first 32.
    const int lane = threadIdx.x % 32;
    const uint32_t x_first = SharedAddress(memory.l) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += kSlices) {
      Wait(&memory.full[at.index], at.parity);
      uint32_t read = 0;  // some of what each of the last loads brings
      const auto multiply = [&](auto scales) {
        read = MultiplyStage<kEights, kSlices, scales.value>(memory, group, at.index, x_first,
                                                             first_block, second_block, sums);
      };
      if constexpr (Weights::kScalesSums) {
        read = AddStage<kEights, kSlices>(memory, group, at.index, x_first, first_block,
                                          second_block, sums);
      } else if constexpr (!kAsks) {
        multiply(AnyScales{});
      } else if (AllSmall(memory, group, at.index, first_block, second_block)) {
        multiply(SmallScales{});
      } else {
        Multiply<kEights * Chains(kEights)>(sums, 1 / kUnit);
        multiply(AnyScales{});
        Multiply<kEights * Chains(kEights)>(sums, kUnit);
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
    if constexpr (Chains(kEights) == 2 && !Weights::kScalesSums) {
      constexpr int kHalf = 4 * kEights;
#pragma unroll
      for (int i = 0; i < kHalf * kBlocks; ++i) {
        float& other = sums[i / kHalf][kHalf + i % kHalf];
        sums[i / kHalf][i % kHalf] += other;
        other = 0.0f;
      }
    }
  }

  // Whether ScaleRange::kSmall does for a stage.
  template <typename Reader>
  __device__ static bool AllSmall(const Memory& memory, int group, int stage, Reader& first_block,
                                  Reader& second_block) {
    const bool first = first_block.AllSmall(memory.scales[stage][0][group]);
    if constexpr (kBlocks == 1) return first;
    return second_block.AllSmall(memory.scales[stage][kBlocks - 1][group]) && first;
  }

  // A stage whose sums scales multiply.
  template <int kEights, int kSlices, typename Reader>
  __device__ static uint32_t AddStage(Memory& memory, int group, int index, uint32_t x_first,
                                      Reader& first_block, Reader& second_block, Sums& sums) {
    static_assert(kSlices == 2);  // 128 k
    first_block.template NextScales<ScaleRange::kSums>(0);
    if (kBlocks == 2) second_block.template NextScales<ScaleRange::kSums>(0);
    Sums parts = {};
    const uint32_t read = MultiplyStage<kEights, kSlices, ScaleRange::kSums>(
        memory, group, index, x_first, first_block, second_block, parts);
    constexpr int kHalf = 4 * kEights;
#pragma unroll
    for (int i = 0; i < kBlocks * kHalf; ++i) {
      const float* of = parts[i / kHalf] + i % kHalf;
      const float part = Chains(kEights) == 1 ? of[0] : of[0] + of[kHalf];
      const Reader& reader = i < kHalf ? first_block : second_block;
      sums[i / kHalf][i % kHalf] += reader.Scale(i / 2 % 2) * part;
    }
    return read;
  }

  template <int kEights>
  __device__ static void Multiply(Sums& sums, float factor) {
    if constexpr (kUnit != 1) {
#pragma unroll
      for (int i = 0; i < 4 * kEights * kBlocks; ++i) {
        sums[i / (4 * kEights)][i % (4 * kEights)] *= factor;
      }
    }
  }

  template <int kEights, int kSlices, ScaleRange kRange, typename Reader>
  __device__ static uint32_t MultiplyStage(Memory& memory, int group, int index, uint32_t x_first,
                                           Reader& first_block, Reader& second_block, Sums& sums) {
    const uint32_t x_stage = x_first + index * sizeof(memory.l[0]);
    typename Reader::Words words[kBlocks];
    uint32_t read = 0;
#pragma unroll
    for (int half = 0; half < 2 * kSlices; ++half) {  // 32 k
      const int s = half / 2;
      uint32_t x[kEights][4];
      const auto load = [&](int i) {
        const uint32_t x_slice = x_stage + s * Config::SliceBytes(8 * kEights) + i * 1024;
        LoadMatrices(half % 2 == 0 ? x_slice : x_slice ^ 64, x[i]);
      };
      constexpr bool kLate = kEights > 2;  // there are registers for some of x only
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        if (!kLate) load(i);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        Reader& reader = b == 0 ? first_block : second_block;
        if (half % 2 == 0) {
          words[b] = reader.template Load<true, kRange>(memory.codes[index][b][group],
                                                        memory.scales[index][b][group], s);
        }
        uint32_t a[8];
        reader.template Read<2, true, kRange>(words[b], s, half % 2 * 2, a);
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          if (kLate) load(i);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            MultiplyWarp<Weights::kX>(a + 4 * step, x[i][2 * step], x[i][2 * step + 1],
                                      sums[b] + 4 * (i + step % Chains(kEights) * kEights));
          }
          if (half == 2 * kSlices - 1) read |= x[i][0];
        }
        if (half == 2 * kSlices - 2) read |= words[b].OfEachLoad();
      }
    }
    return read;
  }
};

// Where tiles are too few for a GPU, the blocks of a cluster share out their k, and all but the
// first send it their sums, for 8 rows at a time. Each warp that multiplies has a place for each of
// them.
struct SharedPartialSums {
  float4 sums[kMostParts - 1][kMultiplyWarps][32];
  uint64_t full[kMultiplyWarps], empty[kMultiplyWarps];
  uint32_t parity[kMultiplyWarps];  // of both; registers are few

  // One thread.
  __device__ void Init() {
    for (int i = 0; i < kMultiplyWarps; ++i) {
      device::Init(&full[i], 1);
      device::Init(&empty[i], 1);
      parity[i] = 0;
    }
  }
};

struct NoPartialSums {
  __device__ void Init() {}
};

// The first block's sums become those of all, added in the order of blocks.
template <typename Config, int kSums>
__device__ void AddParts(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                         const Work& work, float (&sums)[kSums]) {
  if (gemm.parts == 1 || work.weight < 0) return;
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, others = gemm.parts - 1;
  SharedPartialSums& parts = memory.parts;
  const int block = BlockInCluster();
  uint32_t parity = parts.parity[warp];
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    if (8 * i >= work.rows) break;
    float* four = sums + 4 * i;
    if (block > 0) {
      Wait(&parts.empty[warp], parity ^ 1);
      SendTo(0, &parts.sums[block - 1][warp][lane], &parts.full[warp],
             make_float4(four[0], four[1], four[2], four[3]));
    } else {
      if (lane == 0) {
        ArriveExpecting(&parts.full[warp], others * static_cast<int>(sizeof(parts.sums[0][0])));
      }
      Wait(&parts.full[warp], parity);
#pragma unroll 1
      for (int other = 0; other < others; ++other) {
        const float4 part = parts.sums[other][warp][lane];
        four[0] += part.x;
        four[1] += part.y;
        four[2] += part.z;
        four[3] += part.w;
      }
      __syncwarp();  // all lanes have read them
      uint32_t read = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) read |= __float_as_uint(four[j]);
      if (lane < others) ArriveAt(&parts.empty[warp], 1 + lane + ZeroAfter(read));
    }
    parity ^= 1;
  }
  __syncwarp();  // all lanes have read it
  if (lane == 0) parts.parity[warp] = parity;
}

// A tile's sums of a lane's two columns, the second kFurther behind the first, only rounded, by
// each thread's own stores: they are few, and bringing whole lines together would take longer, and
// make warps wait for each other.
template <int kFurther, int kSums>
__device__ void StoreTwoColumns(const GemmSm90& gemm, const Work& work, int lane, int column,
                                const float (&sums)[kSums]) {
  const int64_t out = work.out + column;
#pragma unroll
  for (int block = 0; block < kSums / 4; ++block) {
    if (8 * block >= work.rows) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * block + lane % 4 * 2 + i % 2, right = i / 2 * kFurther;
      if (row < work.rows && column + right < work.columns) {
        StoreFloat(gemm.out, out + row * gemm.out_line + right, gemm.out_dtype,
                   sums[4 * block + i]);
      }
    }
  }
}

// A tile's 64 columns from `column` on.
template <int kSums>
__device__ void StoreFewRows(const GemmSm90& gemm, const Work& work, int column,
                             const float (&sums)[kSums]) {
  const int lane = threadIdx.x % 32;
  column += threadIdx.x % 128 / 32 * 16 + lane / 4;
  StoreTwoColumns<8>(gemm, work, lane, column, sums);
}

}  // namespace jgg::device

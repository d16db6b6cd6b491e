// Tiles of at most 32 rows, as few_rows_sm90.cuh, of weights that are not rounded. Rows that are
// parts of others, such as a float32 number's three bfloat16, are rows of a tile.
#pragma once

#include <cstdint>

#include "quantized/device/few_rows_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/scaled_weights_sm90.cuh"

namespace jgg::device {

template <typename Config>
struct ScaledRowsProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  using Codes = typename Weights::Codes;
  static constexpr int kBlockSums = Config::kRows / 2;
  static_assert(Config::kRows == 32 && Config::kBlocks == 1);
  using Sums = float[1][kBlockSums];

  // As QuantizedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlockSums; ++i) sums[0][i] = 0.0f;
    if (work.rows > 16) {
      MultiplySlices<4>(quantized, memory, work, group, at, sums[0]);
    } else if (work.rows > 8) {
      MultiplySlices<2>(quantized, memory, work, group, at, sums[0]);
    } else if (Codes::kHasBiases && quantized.packed.float_scales) {
      MultiplyEight<PackedFloats::k32Bits>(quantized, memory, work, group, at, sums[0]);
    } else {
      MultiplyEight<PackedFloats::k16Bits>(quantized, memory, work, group, at, sums[0]);
    }
  }

 private:
  // With 8 rows no branch stands between loads and products of a stage: they would wait for each
  // other.
  template <PackedFloats kFloats, typename Stage>
  __device__ static void MultiplyEight(const QuantizedGemmSm90& quantized, Memory& memory,
                                       const Work& work, int group, Stage& at, float* sums) {
    if constexpr (Codes::kHasBiases) {
      if (quantized.packed.tile_groups == 4) {
        return MultiplySlices<1, kFloats, 16>(quantized, memory, work, group, at, sums);
      }
      if (quantized.packed.tile_groups == 2) {
        return MultiplySlices<1, kFloats, 32>(quantized, memory, work, group, at, sums);
      }
    }
    MultiplySlices<1, kFloats, 64>(quantized, memory, work, group, at, sums);
  }

  // Scales multiply sums of kTogether k; 0: of 32, or of 16 in groups of 16. 64: groups have so
  // many.
  template <int kEights, PackedFloats kFloats = PackedFloats::kAny, int kTogether = 0,
            typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, float* sums) {
    constexpr int kSlices = Config::StageSlices(8 * kEights);
    const typename Weights::Reader reader(quantized.packed);
    constexpr int kLeast = kTogether == 0 ? 16 : kTogether;
    const bool sixteens = kTogether == 0 ? quantized.packed.tile_groups == 4 : kTogether == 16;
    // A lane's row of x and, swizzled by it, piece of 8 k, of the first 32.
    const int lane = threadIdx.x % 32;
    const uint32_t x_first = SharedAddress(memory.l) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += kSlices) {
      Wait(&memory.full[at.index], at.parity);
      const uint32_t x_stage = x_first + at.index * sizeof(memory.l[0]);
      uint32_t read = 0;  // some of what each of the last loads brings
      // There are registers for one slice's codes at a time, where rows are many.
#pragma unroll(kEights > 2 ? 1 : kSlices)
      for (int s = 0; s < kSlices; ++s) {
        uint32_t words[Weights::kWords];
        reader.Load(memory.codes[at.index][0][group], s, words);
        Scaled scaled[2];  // of 16 k
        float products[4] = {}, rows[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t numbers[8];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int step = 2 * half + i;
            Codes::Numbers(words, step, numbers + 4 * i);
            if ((step + 1) * 16 % kLeast != 0) continue;
            read |= reader.template Scales<kFloats>(memory.scales[at.index][0][group], s, step,
                                                    scaled[i].scale, scaled[i].bias);
          }
#pragma unroll
          for (int i = 0; i < kEights; ++i) {
            const uint32_t x_slice = x_stage + s * Config::SliceBytes(8 * kEights) + i * 1024;
            uint32_t x[4];
            LoadMatrices(half == 0 ? x_slice : x_slice ^ 64, x);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              MultiplyRows(numbers + 4 * step, x + 2 * step, products, rows);
              if ((2 * half + step + 1) * 16 % kLeast != 0 || (step == 0 && !sixteens)) continue;
              AddScaled(scaled[step], products, rows, sums + 4 * i);
            }
            if (s == kSlices - 1) read |= x[0];  // those before come in order
          }
        }
        read |= words[0] | words[Weights::kWords - 1];
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
  }

  // What products of a thread's two columns are multiplied by, and sums of x.
  struct Scaled {
    float scale[2], bias[2];
  };

  // Adds the products of 8 rows and 16 k, and sums of x.
  __device__ static void MultiplyRows(const uint32_t* numbers, const uint32_t* x,
                                      float (&products)[4], float (&rows)[4]) {
    constexpr uint32_t kOnes[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    MultiplyWarp(numbers, x[0], x[1], products);
    if constexpr (Codes::kHasBiases) MultiplyWarp(kOnes, x[0], x[1], rows);
  }

  // Adds them to the tile's sums, and begins again. Sum j of a thread is that of row j % 2 and
  // column j / 2.
  __device__ static void AddScaled(const Scaled& by, float (&products)[4], float (&rows)[4],
                                   float* sums) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[j] += by.scale[j / 2] * products[j];
      if constexpr (Codes::kHasBiases) sums[j] += by.bias[j / 2] * rows[j % 2];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) products[j] = rows[j] = 0.0f;
  }
};

template <typename Config>
struct PartsOf<Config, true, true> {
  using Products = typename Config::Weights::template RowsProducts<Config>;
};

}  // namespace jgg::device

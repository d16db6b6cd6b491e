// The sums of a tile of FP8 operands, by one warpgroup. Tensor cores add up one block of 128 k at a
// time. The warpgroup adds the block's sums, times their scales, in float32. Hopper's own sums of
// FP8 products keep about 14 bits.
#pragma once

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "fp8/gemm_sm90.h"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"

namespace jgg::device {

// m64nNk32, A (here R) and B (here L) from shared memory.
template <int kN>
struct Fp8Product;

#define JGG_FP8_PRODUCT(N) \
  template <>              \
  struct Fp8Product<N> : cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<> {};
JGG_FP8_PRODUCT(32)
JGG_FP8_PRODUCT(64)
JGG_FP8_PRODUCT(96)
JGG_FP8_PRODUCT(128)
#undef JGG_FP8_PRODUCT

// The same of operands of which one may be e5m2.
template <int kN, bool kAE5M2, bool kBE5M2>
struct Fp8MixedProduct;

#define JGG_FP8_MIXED_PRODUCT(N)                                                                   \
  template <>                                                                                      \
  struct Fp8MixedProduct<N, false, false> : Fp8Product<N> {};                                      \
  template <>                                                                                      \
  struct Fp8MixedProduct<N, true, false> : cute::SM90::GMMA::MMA_64x##N##x32_F32E5M2E4M3_SS_TN<> { \
  };                                                                                               \
  template <>                                                                                      \
  struct Fp8MixedProduct<N, false, true> : cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E5M2_SS_TN<> { \
  };
JGG_FP8_MIXED_PRODUCT(32)
JGG_FP8_MIXED_PRODUCT(64)
JGG_FP8_MIXED_PRODUCT(96)
JGG_FP8_MIXED_PRODUCT(128)
#undef JGG_FP8_MIXED_PRODUCT

// The scales of rows, 64 by 64, as threads read them (see kStagedRows in gemm_sm90.h).
template <int kRows>
struct StagedScales {
  static constexpr int kQuarter = kStagedRows / 4;
  float values[kRows / 64 * kStagedRows];

  __device__ static int Place(int row) {
    return row / 64 * kStagedRows + row % 8 / 2 * kQuarter + row % 64 / 8 * 2 + row % 2;
  }
  // Loads the scales of this thread's rows in two blocks of 8, the i-th and the next.
  __device__ void Load(int i, float (&to)[4]) const {
    const float4 four = *reinterpret_cast<const float4*>(values + i / 8 * kStagedRows +
                                                         threadIdx.x % 4 * kQuarter + i % 8 * 2);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
};

// A stage's, where rows are the instruction's M: of rows, and of every 128 columns of w.
template <int kRows>
struct MmRowScales {
  float rows[kRows], columns[2];
};

// A stage's: of rows, times that of each warpgroup's 128 columns of w; or of rows and of columns.
template <int kRows>
struct MmScales {
  StagedScales<kRows> rows[2];
  __device__ const StagedScales<kRows>& OfRows(int group) const { return rows[group]; }
};

template <int kRows, int kColumns>
struct WgradScales {
  StagedScales<kRows> rows;
  float columns[kColumns];
  __device__ const StagedScales<kRows>& OfRows(int) const { return rows; }
};

template <typename Config>
struct Fp8Products {
  using Memory = typename Config::SharedMemory;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  // A block is 64 columns; a warpgroup has kBlocks neighbouring ones.
  using Sums = float[kBlocks][kRows / 2];

  // Multiplies all k of a tile, and leaves the ring behind it.
  __device__ __forceinline__ static void MultiplyTile(Memory& memory, const Work& work, int group,
                                                      Place<Config::kStages>& at, Sums& sums) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[block][i] = 0.0f;
    }
    if (work.rows > 96) return MultiplySlices<128>(memory, work, group, at, sums);
    if (work.rows > 64) return MultiplySlices<96>(memory, work, group, at, sums);
    if (work.rows > 32) return MultiplySlices<64>(memory, work, group, at, sums);
    return MultiplySlices<32>(memory, work, group, at, sums);
  }

 private:
  template <int kN>
  __device__ __forceinline__ static void MultiplySlices(Memory& memory, const Work& work, int group,
                                                        Place<Config::kStages>& at, Sums& sums) {
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t r_first =
        TileDescriptor(Uniform(SharedAddress(memory.r) + group * kBlocks * 64 * 128), 64 * 128);
    const int slices = Uniform(work.slices);
    Place<Config::kStages> here{Uniform(at.index), Uniform(at.parity)};
#pragma unroll 1
    for (int turn = 0; turn < slices; ++turn) {
      Wait(&memory.full[here.index], here.parity);
      const uint32_t l_tile = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const uint32_t r_tile = r_first + here.index * (sizeof(memory.r[0]) >> 4);
      const auto& scales = memory.scales[here.index].OfRows(group);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float part[kN / 2];
        WarpgroupArrive();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Multiply<Fp8Product<kN>>(r_tile + ((block * 64 * 128 + step * 32) >> 4),
                                   l_tile + ((step * 32) >> 4), part, step > 0,
                                   std::make_index_sequence<kN / 2>{});
        }
        WarpgroupCommit();
        // A thread reads the first scales while tensor cores work, and the others a turn ahead.
        float of_columns[2] = {1.0f, 1.0f};
        if constexpr (Config::kRaggedK) {
          const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            of_columns[i] =
                memory.scales[here.index].columns[64 * (kBlocks * group + block) + first + 8 * i];
          }
        }
        float next[4];
        scales.Load(0, next);
        WarpgroupWait<0>();
#pragma unroll
        for (int i = 0; i < kN / 8; i += 2) {
          float of_rows[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) of_rows[j] = next[j];
          if (i + 2 < kN / 8) scales.Load(i + 2, next);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float value = part[4 * i + j] * of_rows[j / 4 * 2 + j % 2];
            if (Config::kRaggedK) {
              sums[block][4 * i + j] += value * of_columns[j / 2 % 2];
            } else {
              sums[block][4 * i + j] += value;
            }
          }
        }
      }
      __syncwarp();
      Release<Config>(memory, here.index);
      here.Next();
    }
    at = here;
  }
};

// The same where rows are the instruction's M. A warpgroup has 64 rows and all of the tile's 256
// columns. A thread's sums are of two rows, so it reads two scales for a block of k, where above it
// reads kRows / 4. That matters, because products wait for shared memory. A tile of few rows is
// multiplied as if it had 64 or 128.
template <typename Config>
struct Fp8RowProducts {
  using Memory = typename Config::SharedMemory;
  using Sums = float[2][64];  // of 128 columns

  // All k of a tile. Leaves the ring behind it.
  __device__ __forceinline__ static void MultiplyTile(Memory& memory, const Work& work, int group,
                                                      Place<Config::kStages>& at, Sums& sums) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (float& sum : sums[block]) sum = 0.0f;
    }
    if (64 * group >= work.rows) return MultiplySlices<0>(memory, work, group, at, sums);
    if (work.columns <= 128) return MultiplySlices<1>(memory, work, group, at, sums);
    return MultiplySlices<2>(memory, work, group, at, sums);
  }

 private:
  template <int kBlocks>
  __device__ __forceinline__ static void MultiplySlices(Memory& memory, const Work& work, int group,
                                                        Place<Config::kStages>& at, Sums& sums) {
    const uint32_t l_first =
        TileDescriptor(Uniform(SharedAddress(memory.l) + group * 64 * 128), 64 * 128);
    const uint32_t r_first = TileDescriptor(SharedAddress(memory.r), 64 * 128);
    const int slices = Uniform(work.slices);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 64 * group;
    Place<Config::kStages> here{Uniform(at.index), Uniform(at.parity)};
#pragma unroll 1
    for (int turn = 0; turn < slices; ++turn) {
      Wait(&memory.full[here.index], here.parity);
      const uint32_t l_tile = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const uint32_t r_tile = r_first + here.index * (sizeof(memory.r[0]) >> 4);
      const auto& scales = memory.scales[here.index];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float part[64];
        WarpgroupArrive();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Multiply<Fp8Product<128>>(l_tile + ((step * 32) >> 4),
                                    r_tile + ((block * 128 * 128 + step * 32) >> 4), part, step > 0,
                                    std::make_index_sequence<64>{});
        }
        WarpgroupCommit();
        const float of_columns = scales.columns[block];
        const float upper = scales.rows[row] * of_columns,
                    lower = scales.rows[row + 8] * of_columns;
        WarpgroupWait<0>();
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[block][i] += part[i] * (i % 4 < 2 ? upper : lower);
      }
      __syncwarp();
      Release<Config>(memory, here.index);
      here.Next();
    }
    at = here;
  }
};

// The sums of all k, as tensor cores add them up, and the product of both matrices' scales. Sums
// lie as in Fp8Products.
template <typename Config>
struct Fp8FastProducts {
  using Memory = typename Config::SharedMemory;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  using Sums = float[kBlocks][kRows / 2];

  // Returns the scale of sums. meanwhile() is called once, as soon as tensor cores work.
  template <typename Meanwhile>
  __device__ __forceinline__ static float MultiplyTile(const MatrixScales& scales, Memory& memory,
                                                       const Work& work, int group,
                                                       Place<Config::kStages>& at, Sums& sums,
                                                       Meanwhile meanwhile) {
    const bool exists = work.slices > 0;  // else sums are zeros, whatever the scales are
    const int matrix = exists && !Config::kRaggedK ? work.weight : 0;
    float l, r;
    // Volatile: read before the products, not behind them.
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(l) : "l"(scales.l));
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(r) : "l"(scales.r + matrix));
    if (!exists) {
      meanwhile();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (float& sum : sums[block]) sum = 0.0f;
      }
      return 0.0f;
    }
    // The first products replace what sums hold. So they may begin as anything, which the compiler
    // would make zeros of.
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (float& sum : sums[block]) asm volatile("" : "=f"(sum));
    }
    if (work.rows > 96) {
      MultiplySlices<128>(memory, work, group, at, sums, meanwhile);
    } else if (work.rows > 64) {
      MultiplySlices<96>(memory, work, group, at, sums, meanwhile);
    } else if (work.rows > 32) {
      MultiplySlices<64>(memory, work, group, at, sums, meanwhile);
    } else {
      MultiplySlices<32>(memory, work, group, at, sums, meanwhile);
    }
    return l * r;
  }

 private:
  template <int kN, typename Meanwhile>
  __device__ __forceinline__ static void MultiplySlices(Memory& memory, const Work& work, int group,
                                                        Place<Config::kStages>& at, Sums& sums,
                                                        Meanwhile meanwhile) {
    using Instruction = Fp8MixedProduct<kN, Config::kRE5M2, Config::kLE5M2>;
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t r_first =
        TileDescriptor(Uniform(SharedAddress(memory.r) + group * kBlocks * 64 * 128), 64 * 128);
    const int slices = Uniform(work.slices);
    Place<Config::kStages> here{Uniform(at.index), Uniform(at.parity)};
#pragma unroll 1
    for (int turn = 0; turn < slices; ++turn) {
      Wait(&memory.full[here.index], here.parity);
      const uint32_t l_tile = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const uint32_t r_tile = r_first + here.index * (sizeof(memory.r[0]) >> 4);
      WarpgroupArrive();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          Multiply<Instruction>(r_tile + ((block * 64 * 128 + step * 32) >> 4),
                                l_tile + ((step * 32) >> 4), sums[block], step > 0 || turn > 0,
                                std::make_index_sequence<kN / 2>{});
        }
      }
      WarpgroupCommit();
      if (turn == 0) meanwhile();
      WarpgroupWait<0>();
      __syncwarp();
      Release<Config>(memory, here.index);
      here.Next();
    }
    at = here;
  }
};

}  // namespace jgg::device

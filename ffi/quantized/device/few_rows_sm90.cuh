// The sums of a tile of at most 32 rows: each warp multiplies its 16 columns by mma.sync. WGMMA
// would make the four warps of a warpgroup wait for each other every few instructions, and
// decoding, which is what takes the time here, leaves registers for nothing that is under way.
#pragma once

#include <cstdint>

#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

// Four 8 x 8 matrices of bfloat16: lane l names a row of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// m16n8k16.
__device__ inline void MultiplyWarp(const uint32_t* a, uint32_t b0, uint32_t b1, float* sums) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename Config>
struct FewRowsProducts {
  using Memory = typename Config::SharedMemory;
  using Reader = typename Config::Weights::Reader;
  static constexpr int kBlocks = Config::kBlocks, kBlockSums = Config::kRows / 2;
  static_assert(Config::kRows == 32);
  using Sums = float[kBlocks][kBlockSums];

  // As of QuantizedProducts.
  template <typename Stage>
  __device__ static void Tile(const QuantizedGemmSm90& quantized, Memory& memory, const Work& work,
                              int group, Stage& at, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlocks * kBlockSums; ++i) sums[i / kBlockSums][i % kBlockSums] = 0.0f;
    if (work.slices == 0) return;
    if (work.rows <= 8) {
      Loop<1>(quantized, memory, work, group, at, sums);
    } else if (work.rows <= 16) {
      Loop<2>(quantized, memory, work, group, at, sums);
    } else {
      Loop<4>(quantized, memory, work, group, at, sums);
    }
  }

 private:
  // 64 k of a stage, as far as they are loaded before they are decoded. Of more rows x would take
  // too many registers.
  template <int kEights>
  struct Slice {
    static constexpr bool kHoldsX = kEights == 1 && kBlocks == 1;
    typename Reader::Words words[kBlocks];
    uint32_t x[kHoldsX ? 2 : 1][4];
  };

  // kEights of rows. Slices of even number are loaded while odd ones are decoded, and the other way
  // round: a barrier, a load and a chain of products take as long as decoding a slice.
  template <int kEights, typename Stage>
  __device__ static void Loop(const QuantizedGemmSm90& quantized, Memory& memory, const Work& work,
                              int group, Stage& at, Sums& sums) {
    static_assert(Config::kSlices == 2);
    const int column = work.out_column + 64 * group;
    const Reader readers[] = {
        Reader(quantized, memory.table, work.weight, column),
        Reader(quantized, memory.table, work.weight, column + quantized.gemm.n / 2)};
    // A lane's row of x and, swizzled by it, piece of 8 k, of the first 32.
    const int lane = threadIdx.x % 32;
    const uint32_t x_first = SharedAddress(memory.l) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    auto load_x = [&](int index, int s, int half, int eight, uint32_t (&x)[4]) {
      const uint32_t address =
          x_first + index * sizeof(memory.l[0]) + s * sizeof(memory.l[0][0]) + eight * 1024;
      LoadMatrices(half == 0 ? address : address ^ 64, x);
    };
    using S = Slice<kEights>;
    auto load = [&](S& slice, int index, int s) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        slice.words[b] =
            Reader::Load(memory.codes[index][b][group], memory.scales[index][b][group], s);
      }
      if constexpr (S::kHoldsX) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load_x(index, s, half, 0, slice.x[half]);
      }
    };
    // Of one eight of rows the products of every other 16 k are added up by themselves: chains half
    // as long.
    constexpr bool kTwoSums = kEights == 1;
    float others[kTwoSums ? kBlocks : 1][4] = {};
    auto multiply = [&](const S& slice, int k, int s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 32 k
        uint32_t x[S::kHoldsX ? 1 : kEights][4];
        if constexpr (!S::kHoldsX) {
#pragma unroll
          for (int i = 0; i < kEights; ++i) load_x(at.index, s, half, i, x[i]);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[8];
          readers[b].template Read<2, true>(slice.words[b], memory.codes[at.index][b][group],
                                            memory.scales[at.index][b][group], k, s, half * 2, a);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int i = 0; i < kEights; ++i) {
              const uint32_t* rows = S::kHoldsX ? slice.x[half] : x[i];
              float* to = kTwoSums && step == 1 ? others[b] : sums[b] + 4 * i;
              MultiplyWarp(a + 4 * step, rows[2 * step], rows[2 * step + 1], to);
            }
          }
        }
      }
    };
    S even, odd;
    Wait(&memory.full[at.index], at.parity);
    load(even, at.index, 0);
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += 2) {
      load(odd, at.index, 1);
      multiply(even, slice * kSliceSm90, 0);
      Stage next = at;
      next.Next();
      if (slice + 2 < work.slices) {
        Wait(&memory.full[next.index], next.parity);
        load(even, next.index, 0);
      }
      multiply(odd, slice * kSliceSm90, 1);
      __syncwarp();  // all lanes have read the stage
      Release<Config>(memory, at.index);
      at = next;
    }
    if constexpr (kTwoSums) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) sums[i / 4][i % 4] += others[i / 4][i % 4];
    }
  }
};

}  // namespace jgg::device

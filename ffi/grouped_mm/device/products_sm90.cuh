// The sums of a tile, by one warpgroup: WGMMA over the ring of slices.
#pragma once

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/schedule_sm90.cuh"

namespace jgg::device {

// m64nNk16, A (here R) and B (here L) from shared memory.
template <typename Element, int kN, cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WarpgroupProduct;

#define JGG_WARPGROUP_PRODUCT(N)                                     \
  template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>  \
  struct WarpgroupProduct<cutlass::bfloat16_t, N, kA, kB>            \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<kA, kB> {}; \
  template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>  \
  struct WarpgroupProduct<cutlass::half_t, N, kA, kB>                \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<kA, kB> {};
JGG_WARPGROUP_PRODUCT(8)
JGG_WARPGROUP_PRODUCT(16)
JGG_WARPGROUP_PRODUCT(32)
JGG_WARPGROUP_PRODUCT(64)
JGG_WARPGROUP_PRODUCT(96)
JGG_WARPGROUP_PRODUCT(128)
JGG_WARPGROUP_PRODUCT(192)
JGG_WARPGROUP_PRODUCT(256)
#undef JGG_WARPGROUP_PRODUCT

template <typename Config>
struct Products {
  using Memory = typename Config::SharedMemory;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  static constexpr bool kPartial = Config::kLKMajor;
  using Sums = float[kBlocks][kRows / 2];

  // All k of a tile; `cut` where slices may be cleared first. Leaves the ring behind the tile.
  template <typename Stage>
  __device__ static void Tile(Memory& memory, const Work& work, bool cut, int group, Stage& at,
                              Stage& cleared, Sums& sums) {
    if (work.slices == 0) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sums[b][i] = 0.0f;
      }
      return;
    }
    // The narrowest product that holds the tile's rows; whole chunks where L is MN-major.
    if constexpr (kRows > 192) {
      if (work.rows > 192) return Loop<256>(memory, work, cut, group, at, cleared, sums);
    }
    if constexpr (kRows > 128) {
      if (work.rows > 128) return Loop<192>(memory, work, cut, group, at, cleared, sums);
    }
    if constexpr (kRows > 64) {
      if (work.rows > (kPartial ? 96 : 64))
        return Loop<128>(memory, work, cut, group, at, cleared, sums);
      if constexpr (kPartial) {
        if (work.rows > 64) return Loop<96>(memory, work, cut, group, at, cleared, sums);
      }
    }
    if constexpr (!kPartial) {
      Loop<64>(memory, work, cut, group, at, cleared, sums);
    } else {
      if constexpr (kRows > 32) {
        if (work.rows > 32) return Loop<64>(memory, work, cut, group, at, cleared, sums);
      }
      if constexpr (kRows <= 64) {
        if (work.rows <= 8) return Loop<8>(memory, work, cut, group, at, cleared, sums);
        if (work.rows <= 16) return Loop<16>(memory, work, cut, group, at, cleared, sums);
      }
      Loop<32>(memory, work, cut, group, at, cleared, sums);
    }
  }

 private:
  template <int kN, typename Stage>
  __device__ static void Loop(Memory& memory, const Work& work, bool cut, int group, Stage& at,
                              Stage& cleared, Sums& sums) {
    using cute::SM90::GMMA::Major;
    using Instruction =
        WarpgroupProduct<typename Config::Element, kN, Config::kRKMajor ? Major::K : Major::MN,
                         Config::kLKMajor ? Major::K : Major::MN>;
    // Bytes from one 16 k to the next.
    constexpr int kStepL = Config::kLKMajor ? 32 : 16 * 128;
    constexpr int kStepR = Config::kRKMajor ? 32 : 16 * 128;
    const uint32_t l = SharedAddress(memory.l), r = SharedAddress(memory.r) + group * 64 * 128;
    int before = at.index;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; ++slice) {
      Wait(&memory.full[at.index], at.parity);
      if (cut && work.Cut(slice)) {
        Wait(&memory.cleared[cleared.index], cleared.parity);
        cleared.Next();
      }
      const uint64_t l_tile = TileDescriptor(l + at.index * sizeof(memory.l[0]), 64 * 128);
      const uint64_t r_tile = TileDescriptor(r + at.index * sizeof(memory.r[0]), 64 * 128);
      WarpgroupArrive();
#pragma unroll
      for (int step = 0; step < kSliceSm90 / 16; ++step) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          Multiply<Instruction>(r_tile + ((step * kStepR + b * 2 * 64 * 128) >> 4),
                                l_tile + (step * kStepL >> 4), sums[b], slice > 0 || step > 0,
                                std::make_index_sequence<kN / 2>{});
        }
      }
      WarpgroupCommit();
      if (slice > 0) {
        WarpgroupWait<1>();
        Release(memory, before);
      }
      before = at.index;
      at.Next();
    }
    WarpgroupWait<0>();
    Release(memory, before);
  }

  // Every warp tells every block that copies into this place that it has read it.
  __device__ static void Release(Memory& memory, int index) {
    const int lane = threadIdx.x % 32;
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) Arrive(&memory.empty[index]);
    } else {
      if (lane < Config::kCluster) ArriveAt(&memory.empty[index], lane);
    }
  }
};

}  // namespace jgg::device

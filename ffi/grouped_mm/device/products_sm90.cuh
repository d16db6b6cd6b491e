// The sums of a tile, by one warpgroup: WGMMA over the ring of slices.
#pragma once

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "grouped_mm/device/policies_sm90.cuh"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"

namespace jgg::device {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

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
JGG_WARPGROUP_PRODUCT(72)
JGG_WARPGROUP_PRODUCT(80)
JGG_WARPGROUP_PRODUCT(88)
JGG_WARPGROUP_PRODUCT(96)
JGG_WARPGROUP_PRODUCT(104)
JGG_WARPGROUP_PRODUCT(112)
JGG_WARPGROUP_PRODUCT(120)
JGG_WARPGROUP_PRODUCT(128)
JGG_WARPGROUP_PRODUCT(136)
JGG_WARPGROUP_PRODUCT(144)
JGG_WARPGROUP_PRODUCT(160)
JGG_WARPGROUP_PRODUCT(176)
JGG_WARPGROUP_PRODUCT(192)
JGG_WARPGROUP_PRODUCT(208)
JGG_WARPGROUP_PRODUCT(224)
JGG_WARPGROUP_PRODUCT(240)
JGG_WARPGROUP_PRODUCT(256)
#undef JGG_WARPGROUP_PRODUCT

// Tells the compiler that all lanes have the same value, which it cannot know.
template <typename T>
__device__ T Uniform(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

template <typename Config>
struct Products {
  using Memory = typename Config::SharedMemory;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  static constexpr int kHalves = Config::kHalves;
  // MN-major tiles are multiplied by whole chunks of 64 rows.
  static constexpr bool kPartial = Config::kLKMajor;
  using Sums = float[kBlocks * kHalves][kRows / kHalves / 2];

  // Multiplies all k of a tile, and leaves the ring behind it. `cut`: slices may be cleared first.
  // Calls `meanwhile` while a slice is multiplied. Returns how many rows' sums one half has.
  template <typename Stage, typename Meanwhile = Nothing>
  __device__ static int MultiplyTile(Memory& memory, const Work& work, bool cut, int group,
                                     Stage& at, Stage& cleared, Sums& sums,
                                     Meanwhile meanwhile = {}) {
    if (!Config::kNeedsSlices && work.slices == 0) {
#pragma unroll
      for (int b = 0; b < kBlocks * kHalves; ++b) {
#pragma unroll
        for (int i = 0; i < kRows / kHalves / 2; ++i) sums[b][i] = 0.0f;
      }
      return kRows / kHalves;
    }
    // The narrowest product that holds the tile's rows.
    auto loop = [&](auto n, auto halves) {
      MultiplySlices<n.value, halves.value>(memory, work, cut, group, at, cleared, sums, meanwhile);
      return n.value;
    };
    using One = Constant<1>;
    if constexpr (kHalves == 2) {
      if (work.rows > 128) {
        using Two = Constant<2>;
        switch ((work.rows + 15) / 16) {
          case 9: return loop(Constant<72>{}, Two{});
          case 10: return loop(Constant<80>{}, Two{});
          case 11: return loop(Constant<88>{}, Two{});
          case 12: return loop(Constant<96>{}, Two{});
          case 13: return loop(Constant<104>{}, Two{});
          case 14: return loop(Constant<112>{}, Two{});
          case 15: return loop(Constant<120>{}, Two{});
          case 16: return loop(Constant<128>{}, Two{});
          case 17: return loop(Constant<136>{}, Two{});
          default: return loop(Constant<144>{}, Two{});
        }
      }
    }
    if constexpr (kRows == 256 && kPartial) {
      switch ((work.rows + 15) / 16) {
        case 9: return loop(Constant<144>{}, One{});
        case 10: return loop(Constant<160>{}, One{});
        case 11: return loop(Constant<176>{}, One{});
        case 12: return loop(Constant<192>{}, One{});
        case 13: return loop(Constant<208>{}, One{});
        case 14: return loop(Constant<224>{}, One{});
        case 15: return loop(Constant<240>{}, One{});
        case 16: return loop(Constant<256>{}, One{});
        default: break;
      }
    } else if constexpr (kRows == 256) {
      if (work.rows > 192) return loop(Constant<256>{}, One{});
      if (work.rows > 128) return loop(Constant<192>{}, One{});
    }
    if constexpr (kRows > 64) {
      if (work.rows > (kPartial ? 96 : 64)) return loop(Constant<128>{}, One{});
      if constexpr (kPartial) {
        if (work.rows > 64) return loop(Constant<96>{}, One{});
      }
    }
    if constexpr (!kPartial) {
      return loop(Constant<64>{}, One{});
    } else {
      if constexpr (kRows > 32) {
        if (work.rows > 32) return loop(Constant<64>{}, One{});
      }
      if constexpr (kRows <= 64) {
        if (work.rows <= 8) return loop(Constant<8>{}, One{});
        if (work.rows <= 16) return loop(Constant<16>{}, One{});
      }
      return loop(Constant<32>{}, One{});
    }
  }

 private:
  template <int kN, int kHalvesUsed, typename Stage, typename Meanwhile>
  __device__ static void MultiplySlices(Memory& memory, const Work& work, bool cut, int group,
                                        Stage& at, Stage& cleared, Sums& sums,
                                        Meanwhile meanwhile) {
    using cute::SM90::GMMA::Major;
    using Instruction =
        WarpgroupProduct<typename Config::Element, kN, Config::kRKMajor ? Major::K : Major::MN,
                         Config::kLKMajor ? Major::K : Major::MN>;
    // Bytes from one 16 k to the next.
    constexpr int kStepL = Config::kLKMajor ? 32 : 16 * 128;
    constexpr int kStepR = Config::kRKMajor ? 32 : 16 * 128;
    // Every lane has the same addresses, and Uniform says so. The uniform datapath makes the
    // descriptors then. Otherwise each takes a dozen instructions.
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t r_first =
        TileDescriptor(Uniform(SharedAddress(memory.r) + group * 64 * 128), 64 * 128);
    const int slices = Uniform(work.slices), last = Uniform(work.last);
    const bool cut_last = cut && last < kSliceSm90, cut_first = cut && Uniform(work.first) > 0;
    Stage here{Uniform(at.index), Uniform(at.parity)};
    // The last slice comes first. Only the k that it has are multiplied.
    const bool stepwise = Config::kNeedsSlices || last <= kSliceSm90 - 16;
    uint32_t l_tile, r_tile;
    auto begin = [&](int turn) {
      Wait(&memory.full[here.index], here.parity);
      if constexpr (Config::kByList != ByList::kNothing)
        FenceAsyncProxy();  // see rows_by_list_sm90.cuh
      if (turn == 0 ? cut_last || (cut_first && slices == 1) : cut_first && turn == 1) {
        Wait(&memory.cleared[cleared.index], cleared.parity);
        cleared.Next();
      }
      l_tile = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      r_tile = r_first + here.index * (sizeof(memory.r[0]) >> 4);
    };
    auto multiply = [&](int step, bool add) {
#pragma unroll
      for (int i = 0; i < kBlocks * kHalvesUsed; ++i) {
        const int r_offset = kBlocks > 1 ? i * 2 * 64 * 128 : 0;
        const int l_offset = kBlocks > 1 ? 0 : i * kN * 128;
        Multiply<Instruction>(r_tile + ((step * kStepR + r_offset) >> 4),
                              l_tile + ((step * kStepL + l_offset) >> 4), sums[i], add,
                              std::make_index_sequence<kN / 2>{});
      }
    };
    // A warpgroup waits for a slice before it begins the next one, and releases the stage at once.
    // The other warpgroup's products fill the gap. The next copy into this stage does not wait for
    // later slices.
    auto end = [&] {
      WarpgroupWait<0>();
      Release<Config>(memory, here.index);
      here.Next();
    };
    if (stepwise) {
      begin(0);
      int step = 0;
      if constexpr (Config::kNeedsSlices) {
        WarpgroupArrive();
        multiply(step++, false);
        WarpgroupCommit();
      }
#pragma unroll 1
      for (; step * 16 < last; ++step) {
        WarpgroupArrive();
        multiply(step, Config::kNeedsSlices || step > 0);
        WarpgroupCommit();
      }
      if constexpr (Config::kNeedsSlices) meanwhile();
      end();
    }
#pragma unroll 1
    for (int turn = stepwise; turn < slices; ++turn) {
      begin(turn);
      WarpgroupArrive();
#pragma unroll
      for (int step = 0; step < kSliceSm90 / 16; ++step) {
        multiply(step, Config::kNeedsSlices || turn > 0 || step > 0);
      }
      WarpgroupCommit();
      meanwhile();
      end();
    }
    at = here;
  }
};

}  // namespace jgg::device

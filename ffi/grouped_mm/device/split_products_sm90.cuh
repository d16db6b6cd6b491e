// The sums of a tile of float32 operands, by one warpgroup. Each operand is the exact sum of
// kPlanes bfloat16 planes, of 8 bits of its significand each, the first the largest; planes i and j
// are multiplied where i + j < kPlanes. That leaves out 2^-24 of a product with three planes, 2^-16
// with two.
#pragma once

#include <cstdint>
#include <utility>

#include "grouped_mm/device/products_sm90.cuh"

namespace jgg::device {

template <typename Config>
struct SplitProducts {
  using Memory = typename Config::SharedMemory;
  static constexpr int kPlanes = Config::kPlanes, kRows = Config::kRows;
  using Sums = float[1][kRows / 2];

  // As Products::MultiplyTile.
  template <typename Stage, typename Meanwhile = Nothing>
  __device__ static int MultiplyTile(Memory& memory, const Work& work, bool cut, int group,
                                     Stage& at, Stage& cleared, Sums& sums, Meanwhile = {}) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[0][i] = 0.0f;
    auto loop = [&](auto n) {
      MultiplySlices<n.value>(memory, work, cut, group, at, cleared, sums[0]);
      return n.value;
    };
    if constexpr (kRows > 64) {
      if (work.rows > 64) return loop(Constant<128>{});
    }
    if constexpr (Config::kLKMajor) {
      if (work.rows <= 32) return loop(Constant<32>{});
    }
    return loop(Constant<64>{});
  }

 private:
  // Tensor cores cut their sums off where float32 arithmetic rounds them. So they add up one slice
  // only, and in it the largest products come last.
  template <int kN, typename Stage>
  __device__ static void MultiplySlices(Memory& memory, const Work& work, bool cut, int group,
                                        Stage& at, Stage& cleared, float* totals) {
    using cute::SM90::GMMA::Major;
    using Instruction =
        WarpgroupProduct<typename Config::Element, kN, Config::kRKMajor ? Major::K : Major::MN,
                         Config::kLKMajor ? Major::K : Major::MN>;
    constexpr int kStepL = Config::kLKMajor ? 32 : 16 * 128;
    constexpr int kStepR = Config::kRKMajor ? 32 : 16 * 128;
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t r_first =
        TileDescriptor(Uniform(SharedAddress(memory.r) + group * 64 * 128), 64 * 128);
    const int slices = Uniform(work.slices);
    Stage here{Uniform(at.index), Uniform(at.parity)};
#pragma unroll 1
    for (int turn = 0; turn < slices; ++turn) {
      Wait(&memory.full[here.index], here.parity);
      if (cut && work.Cut(work.Slice(turn))) {
        Wait(&memory.cleared[cleared.index], cleared.parity);
        cleared.Next();
      }
      const uint32_t l_tile = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const uint32_t r_tile = r_first + here.index * (sizeof(memory.r[0]) >> 4);
      float sums[kN / 2];
      WarpgroupArrive();
#pragma unroll
      for (int order = kPlanes - 1; order >= 0; --order) {
#pragma unroll
        for (int i = 0; i <= order; ++i) {
#pragma unroll
          for (int step = 0; step < kSliceSm90 / 16; ++step) {
            const int l_offset = i * sizeof(memory.l[0][0]) + step * kStepL;
            const int r_offset = (order - i) * sizeof(memory.r[0][0]) + step * kStepR;
            Multiply<Instruction>(r_tile + (r_offset >> 4), l_tile + (l_offset >> 4), sums,
                                  order < kPlanes - 1 || i > 0 || step > 0,
                                  std::make_index_sequence<kN / 2>{});
          }
        }
      }
      WarpgroupCommit();
      WarpgroupWait<0>();
      Release<Config>(memory, here.index);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) totals[i] += sums[i];
      here.Next();
    }
    at = here;
  }
};

}  // namespace jgg::device

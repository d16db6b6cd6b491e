// The kernel: tiles out[m, n] = sum_k A[m, k] B[n, k], persistent, a ring of kStages slices of A
// and B filled by cp.async while the tensor cores work on an earlier one.
#pragma once

#include <cstdint>

#include "grouped_mm/device/compute_sm80.cuh"
#include "grouped_mm/device/copy_sm80.cuh"
#include "grouped_mm/device/epilogue_sm80.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"

namespace jgg::device {

// The operands of a tile. Traits of a tile derive from this; they say kM, kN, kK (of a slice),
// kStages, kBlocksPerSm and how Ops shares the tile out (../gemm_sm80.cuh).
template <typename Element_, bool kAKMajor_, bool kBKMajor_>
struct TraitsSm80 {
  using Element = Element_;
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_;
};

template <typename Traits, typename Ops_>
struct GemmConfig {
  using Element = typename Traits::Element;
  using Ops = Ops_;
  static constexpr bool kAKMajor = Traits::kAKMajor, kBKMajor = Traits::kBKMajor;
  static constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK;
  static constexpr int kStages = Traits::kStages, kBlocksPerSm = Traits::kBlocksPerSm;
  static constexpr int kThreads = Ops::kThreads;
  using Work = Schedule<kM, kN, kThreads, kAKMajor, kBKMajor>;
  template <bool kKMajor, int kMn, typename Tile>
  using Copy =
      cute::conditional_t<Tile::kTransposed, TransposingCopy<Element, kMn, kK, kThreads, Tile>,
                          TileCopy<Element, kKMajor, kMn, kK, kThreads, Tile>>;
  using CopyA = Copy<kAKMajor, kM, typename Ops::ATile>;
  using CopyB = Copy<kBKMajor, kN, typename Ops::BTile>;
  using Result = ResultTile<kM, kN, kThreads>;

  struct SharedMemory {
    struct Slices {
      alignas(128) Element a[kStages][Ops::ATile::kElements];
      alignas(128) Element b[kStages][Ops::BTile::kElements];
    };
    union {
      Slices slices;
      alignas(128) float result[Result::kFloats];
    };
    typename Work::Memory schedule;
  };
};

// The largest copy, in elements, that `width` and this position allow.
__device__ inline int WidthAt(int width, int64_t position) {
  const int aligned = static_cast<int>(position & -position & (width - 1));
  return aligned == 0 ? width : aligned;
}

template <typename Config>
__device__ Lines LinesOfA(const GemmSm80& gemm) {
  return Lines{gemm.a_line, 0};
}

// Gated: one half of the tile has the gates, the other the values that they multiply.
template <typename Config>
__device__ Lines LinesOfB(const GemmSm80& gemm) {
  if (!IsGated(gemm.epilogue.activation)) return Lines{gemm.b_line, 0};
  const int64_t columns = gemm.n / 2 - Config::kN / 2;
  return Lines{gemm.b_line, columns * (Config::kBKMajor ? gemm.b_line : 1)};
}

// Begin copying the operands of a tile for one of its segments. The values of k that contribute are
// [k_lo, k_hi), counted like the slices from a place where copies are aligned.
template <typename Config>
__device__ void BeginSegment(const GemmSm80& gemm, const Tile& tile, const Segment& segment,
                             typename Config::CopyA& copy_a, typename Config::CopyB& copy_b,
                             int& k_lo, int& k_hi) {
  using Element = typename Config::Element;
  constexpr bool kA = Config::kAKMajor, kB = Config::kBKMajor;
  const Element* a = static_cast<const Element*>(gemm.a);
  const Element* b = static_cast<const Element*>(gemm.b);
  const Lines lines_a = LinesOfA<Config>(gemm), lines_b = LinesOfB<Config>(gemm);
  if (gemm.product == GemmSm80::Product::kMm) {
    const int64_t row = segment.x_start + (tile.row0 - segment.y_start);
    k_lo = 0;
    k_hi = static_cast<int>(gemm.k);
    copy_a.Begin(a + (kA ? row * gemm.a_line : row), lines_a, tile.m_lo, tile.m_hi,
                 kA ? gemm.a_width : WidthAt(gemm.a_width, row), Config::kM);
    copy_b.Begin(b + segment.weight * gemm.b_group + tile.n0 * (kB ? gemm.b_line : 1), lines_b, 0,
                 tile.n_count, gemm.b_width,
                 IsGated(gemm.epilogue.activation) ? Config::kN / 2 : Config::kN);
  } else {
    const int64_t row_a = int64_t{segment.x_start} - tile.shift;
    const int64_t row_b = int64_t{segment.y_start} - tile.shift;
    k_lo = tile.shift;
    k_hi = tile.shift + segment.length;
    copy_a.Begin(a + (kA ? tile.row0 * gemm.a_line + row_a : tile.row0 + row_a * gemm.a_line),
                 lines_a, 0, tile.m_hi, kA ? WidthAt(gemm.a_width, row_a) : gemm.a_width,
                 Config::kM);
    copy_b.Begin(b + (kB ? tile.n0 * gemm.b_line + row_b : tile.n0 + row_b * gemm.b_line), lines_b,
                 0, tile.n_count, kB ? WidthAt(gemm.b_width, row_b) : gemm.b_width, Config::kN);
  }
}

// Add the products of one segment to a tile.
template <typename Config>
__device__ void AddSegment(const GemmSm80& gemm, const Tile& tile, const Segment& segment,
                           typename Config::SharedMemory::Slices& slices,
                           typename Config::Ops& ops) {
  constexpr int kStages = Config::kStages, kK = Config::kK;
  typename Config::CopyA copy_a;
  typename Config::CopyB copy_b;
  int k_lo, k_hi;
  BeginSegment<Config>(gemm, tile, segment, copy_a, copy_b, k_lo, k_hi);
  const bool cut = gemm.product == GemmSm80::Product::kWgrad;
  // Places in the ring: `write` is filled next, `read` is multiplied next.
  int write = 0, k_write = 0;
  auto start = [&] {
    if (k_write < k_hi) {
      copy_a.Next(slices.a[write], LinesOfA<Config>(gemm), k_write, k_lo, k_hi);
      copy_b.Next(slices.b[write], LinesOfB<Config>(gemm), k_write, k_lo, k_hi);
    }
    cute::cp_async_fence();  // an empty group too, so that there is one per slice
    k_write += kK;
    write = write + 1 == kStages ? 0 : write + 1;
  };
#pragma unroll 1
  for (int slice = 0; slice < kStages - 1; ++slice) start();
  int read = 0;
#pragma unroll 1
  for (int k = 0; k < k_hi; k += kK) {
    cute::cp_async_wait<kStages - 2>();
    if (cut && (k < k_lo || k + kK > k_hi)) {
      // The segment's neighbours are in this slice, and 0 * NaN is NaN. So every thread clears what
      // it copied outside of the segment, which needs no barrier of its own.
      copy_a.ZeroOutside(slices.a[read], k, k_lo, k_hi);
      copy_b.ZeroOutside(slices.b[read], k, k_lo, k_hi);
    }
    // All copies of this slice have landed, and nobody reads the slice that is filled next.
    __syncthreads();
    ops.Add(slices.a[read], slices.b[read], start);
    read = read + 1 == kStages ? 0 : read + 1;
  }
  __syncthreads();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    GemmSm80Kernel(const __grid_constant__ GemmSm80 gemm) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(memory);
  typename Config::Work work(gemm, shared.schedule);
  typename Config::Ops ops;
  const Tile& tile = shared.schedule.tile;
  while (work.Next()) {
    ops.Clear();
    int index = -1;
    Segment segment;
    while (work.NextSegment(index, segment)) {
      AddSegment<Config>(gemm, tile, segment, shared.slices, ops);
    }
    Config::Result::Store(gemm, tile, ops, shared.result);
  }
}

}  // namespace jgg::device

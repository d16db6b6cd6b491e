// Host side of the sm80 kernel: tile shapes, choice between them, launch.
#pragma once

#include <algorithm>

#include "common/arch.h"
#include "common/blocks_that_fit.h"
#include "common/processors.h"
#include "common/sample.h"
#include "grouped_mm/device/gemm_sm80.cuh"
#include "grouped_mm/device/pipelined_sm80.cuh"
#include "grouped_mm/gemm_sm80.h"
#include "grouped_mm/tiles_sm80.h"

namespace jgg {

// At most this many tiles exist, whatever the sizes are: each segment may begin and end a tile, and
// have a gap before it.
template <typename Config>
int64_t MostTiles(const GemmSm80& gemm) {
  const bool mm = gemm.product == GemmSm80::Product::kMm;
  const int64_t columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
  const int64_t tile_columns =
      int64_t{Config::kN} << gemm.run_bits >> IsGated(gemm.epilogue.activation);
  const int64_t n_tiles = (columns + tile_columns - 1) / tile_columns;
  const int64_t m_tiles = mm ? gemm.rows_y / Config::kM + 3 * (gemm.metadata.count + 1)
                             : (gemm.m + Config::kM - 1) / Config::kM * gemm.groups;
  return m_tiles * n_tiles;
}

// Launch one configuration: as many blocks as the device holds at a time, which share out the
// tiles. If a block can find its tile without a scan, launch a block for each tile instead: tiles
// of segments of different lengths take different times, and the device starts a block when another
// finishes. `arguments` are the kernel's; `gemm` is their part about the tiles.
template <typename Config, typename Arguments>
cudaError_t LaunchTiles(cudaStream_t stream, void (*kernel)(Arguments), const Arguments& arguments,
                        const GemmSm80& gemm, int bytes, KnownBlocks& known) {
  int blocks = 0;
  if (cudaError_t error = BlocksThatFit(reinterpret_cast<const void*>(kernel), Config::kThreads,
                                        bytes, known, &blocks)) {
    return error;
  }
  const int64_t tiles = MostTiles<Config>(gemm);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (tiles == 0) return cudaSuccess;
  const bool scans = gemm.order != GemmSm80::Order::kMatrices;
  blocks = static_cast<int>(scans ? std::min<int64_t>(tiles, blocks) : tiles);
  kernel<<<blocks, Config::kThreads, bytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <typename Config>
constexpr int kBytesSm80 = sizeof(typename Config::SharedMemory);

// The same with `arguments`, which the kernel takes, made of a problem.
template <typename Config, typename Arguments, typename Make>
cudaError_t LaunchOrdered(cudaStream_t stream, void (*kernel)(Arguments), GemmSm80 gemm,
                          KnownBlocks& known, Make make) {
  constexpr int kBytes = kBytesSm80<Config>;
  if (gemm.order == GemmSm80::Order::kMatrices && gemm.groups <= 32) {
    int blocks = 0;
    if (cudaError_t error = BlocksThatFit(reinterpret_cast<const void*>(kernel), Config::kThreads,
                                          kBytes, known, &blocks)) {
      return error;
    }
    gemm.longest_first = MostTiles<Config>(gemm) > blocks;
  }
  return LaunchTiles<Config>(stream, kernel, make(gemm), gemm, kBytes, known);
}

template <typename Config>
cudaError_t LaunchConfig(cudaStream_t stream, const GemmSm80& gemm) {
  static KnownBlocks known{};
  return LaunchOrdered<Config>(stream, device::GemmSm80Kernel<Config>, gemm, known,
                               [](const GemmSm80& gemm) { return gemm; });
}

template <typename Config>
cudaError_t LaunchPipelined(cudaStream_t stream, const GemmSm80& gemm) {
  static KnownBlocks known{};
  return LaunchOrdered<Config>(stream, device::PipelinedSm80Kernel<Config>, gemm, known,
                               device::MakePipelined<Config>);
}

// Low: few rows, tiles as low as an instruction, so that memory sets the pace. Large: reuses most.
// Medium: where large tiles would be half empty, or too few. Small: where even those are too few to
// keep a GPU busy; groups of threads then share out k.
template <typename Element, bool kA, bool kB>
struct ConfigsSm80 {
  static constexpr int kLine = 128 / sizeof(Element);  // elements of a cache line
  static constexpr bool kTf32 = sizeof(Element) == 4;
  using Operands = device::TraitsSm80<Element, kA, kB>;
  struct LowTraits : Operands {
    static constexpr int kM = 16, kN = 128, kK = kLine, kStages = 3, kBlocksPerSm = 3;
    static constexpr int kWarpsM = 1, kWarpsN = 4, kWarpsK = 1;
  };
  struct SmallTraits : Operands {
    static constexpr int kM = kTf32 ? 64 : 32, kN = 64, kK = 2 * kLine;
    static constexpr int kStages = 3, kBlocksPerSm = 2;
    static constexpr int kWarpsM = kTf32 ? 2 : 1, kWarpsN = 2, kWarpsK = kTf32 ? 2 : 4;
  };
  struct MediumTraits : Operands {
    static constexpr int kM = 64, kN = kTf32 ? 64 : 128, kK = kLine, kStages = 3, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
  };
  struct LargeTraits : Operands {
    static constexpr int kM = 128, kN = 128, kK = kLine / 2, kStages = 4, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
  };
  template <typename T>
  using Config = device::GemmConfig<T, device::TensorOps<Element, kA, kB, T::kM, T::kN, T::kK,
                                                         T::kWarpsM, T::kWarpsN, T::kWarpsK>>;
  using Low = Config<LowTraits>;
  using Small = Config<SmallTraits>;
  using Medium = Config<MediumTraits>;
  using Large = Config<LargeTraits>;
  // Tiles of 64 x 64.
  static int64_t SmallBelow() { return kTf32 ? 4 * Processors() : 128; }
};

template <bool kA, bool kB>
struct ConfigsSm80<float, kA, kB> {
  using Operands = device::TraitsSm80<float, kA, kB>;
  struct LowTraits : Operands {
    static constexpr int kM = 16, kN = 128, kK = 32, kStages = 3, kBlocksPerSm = 3;
    static constexpr int kThreadsM = 4, kThreadsN = 32, kThreadsK = 1;
  };
  struct SmallTraits : Operands {
    static constexpr int kM = 32, kN = 64, kK = 32, kStages = 4, kBlocksPerSm = 2;
    static constexpr int kThreadsM = 8, kThreadsN = 8, kThreadsK = 4;
  };
  struct MediumTraits : Operands {
    static constexpr int kM = 64, kN = 64, kK = 16, kStages = 4, kBlocksPerSm = 3;
    static constexpr int kThreadsM = 16, kThreadsN = 8, kThreadsK = 1;
  };
  struct LargeTraits : Operands {
    static constexpr int kM = 128, kN = 64, kK = 16, kStages = 4, kBlocksPerSm = 2;
    static constexpr int kThreadsM = 16, kThreadsN = 8, kThreadsK = 1;
  };
  template <typename T>
  using Config = device::GemmConfig<
      T, device::FloatOps<kA, kB, T::kM, T::kN, T::kK, T::kThreadsM, T::kThreadsN, T::kThreadsK>>;
  using Low = Config<LowTraits>;
  using Small = Config<SmallTraits>;
  using Medium = Config<MediumTraits>;
  using Large = Config<LargeTraits>;
  static int64_t SmallBelow() { return 4 * Processors(); }
};

// How many tiles of m x n a result has if its segments are equally long.
inline int64_t Tiles(const GemmSm80& gemm, int64_t m, int64_t n) {
  const bool mm = gemm.product == GemmSm80::Product::kMm;
  const int64_t m_tiles = ((mm ? gemm.rows_y : gemm.m) + m - 1) / m;
  return m_tiles * ((gemm.n + n - 1) / n) * (mm ? 1 : gemm.groups);
}

// Rows of the result that a tile may have. An average over groups says little, because a few groups
// may hold all the rows. Elements of 2 bytes stream as fast through Medium tiles, so with them only
// a result of few rows takes low tiles.
template <typename Element>
int64_t TypicalRows(const GemmSm80& gemm, int64_t low) {
  if (gemm.product == GemmSm80::Product::kWgrad) return gemm.m;
  const int64_t average =
      (gemm.rows_y + gemm.metadata.count - 1) / std::max<int64_t>(gemm.metadata.count, 1);
  return sizeof(Element) == 2 && gemm.rows_y > low ? std::max(average, low + 1) : average;
}

// Tiles with a pipeline: for 16-bit elements, mm of x in rows, or wgrad of x and y in rows.
template <typename Element, bool kAKMajor, bool kBKMajor>
constexpr bool kHasPipelined = sizeof(Element) == 2 && (kAKMajor || !kBKMajor);

// Their slices have 32 k. A ring of 4 of Wide's fits into the 99 KB that every GPU has.
template <typename Element, bool kA, bool kB>
using SquareSm80 = device::PipelinedConfig<Element, kA, kB, 128, 128, 4, 2, 512>;
template <typename Element, bool kA, bool kB>
using WideSm80 = device::PipelinedConfig<Element, kA, kB, 128, 256, 4, 1, 128>;

// Whether the pipeline takes these operands: copies are of 16 bytes, and results lie in rows. A
// gated w whose rows lie along n takes as long here as in the smaller tiles, which need fewer
// registers (docs/lab/sm80.md).
inline bool CanPipeline(const GemmSm80& gemm, bool a_k_major, bool b_k_major) {
  const bool mm = gemm.product == GemmSm80::Product::kMm;
  if (!b_k_major && IsGated(gemm.epilogue.activation)) return false;
  return mm == a_k_major && gemm.a_width == 8 && gemm.b_width == 8 && gemm.out_n == 1 &&
         (!mm || gemm.k % 8 == 0);
}

inline ProblemSm80 ProblemOf(const GemmSm80& gemm) {
  if (gemm.product == GemmSm80::Product::kMm) {
    return {true, gemm.rows_y, gemm.n, gemm.k, 1, gemm.metadata.count};
  }
  return {false,       gemm.m,
          gemm.n,      gemm.rows_x / std::max<int64_t>(gemm.groups, 1),
          gemm.groups, gemm.metadata.count};
}

// Beside each other: in wgrad of short sums, so that a block looks for tiles less often.
template <typename Config>
GemmSm80 WithRuns(GemmSm80 gemm, const ProblemSm80& problem, const GpuSm80& gpu) {
  constexpr int kMostBits = 2;
  while (!problem.mm && problem.k <= 1024 && gemm.run_bits < kMostBits &&
         (int64_t{Config::kN} << gemm.run_bits) < gemm.n &&
         MostTiles<Config>(gemm) > 16 * Config::kBlocksPerSm * gpu.processors) {
    ++gemm.run_bits;
  }
  return gemm;
}

template <typename Element, bool kAKMajor, bool kBKMajor>
cudaError_t LaunchGemmSm80Instance(cudaStream_t stream, const GemmSm80& gemm) {
  using Configs = ConfigsSm80<Element, kAKMajor, kBKMajor>;
  constexpr int64_t kLow = Configs::Low::kM, kMedium = Configs::Medium::kM;
  const int64_t medium_below = 4 * Processors();  // tiles of 128 x 128
  static_assert(kBytesSm80<typename Configs::Low> <= kLeastSharedMemory);
  static_assert(kBytesSm80<typename Configs::Medium> <= kLeastSharedMemory);
  static_assert(kBytesSm80<typename Configs::Large> <= kLeastSharedMemory);
  const int64_t rows = TypicalRows<Element>(gemm, kLow);
  if (rows <= kLow) return LaunchConfig<typename Configs::Low>(stream, gemm);
  // Small tiles of tf32 are all that does not fit on every GPU.
  const bool fits = kBytesSm80<typename Configs::Small> <= SharedMemory();
  if (fits && Tiles(gemm, 64, 64) < Configs::SmallBelow()) {
    return LaunchConfig<typename Configs::Small>(stream, gemm);
  }
  if constexpr (kHasPipelined<Element, kAKMajor, kBKMajor>) {
    if (rows > kMedium / 2 && CanPipeline(gemm, kAKMajor, kBKMajor)) {
      const ProblemSm80 problem = ProblemOf(gemm);
      const GpuSm80 gpu{Processors(), SharedMemory()};
      using Wide = WideSm80<Element, kAKMajor, kBKMajor>;
      using Square = cute::conditional_t<kSample, Wide, SquareSm80<Element, kAKMajor, kBKMajor>>;
      static_assert(kBytesSm80<Wide> <= kLeastSharedMemory &&
                    kBytesSm80<Square> <= kLeastSharedMemory);
      switch (ChooseTileSm80(problem, gpu)) {
        case TileSm80::kWide:
          return LaunchPipelined<Wide>(stream, WithRuns<Wide>(gemm, problem, gpu));
        case TileSm80::kSquare:
          return LaunchPipelined<Square>(stream, WithRuns<Square>(gemm, problem, gpu));
        case TileSm80::kMedium: return LaunchConfig<typename Configs::Medium>(stream, gemm);
      }
    }
  }
  if (rows <= kMedium || Tiles(gemm, 128, 128) < medium_below) {
    return LaunchConfig<typename Configs::Medium>(stream, gemm);
  }
  return LaunchConfig<typename Configs::Large>(stream, gemm);
}

}  // namespace jgg

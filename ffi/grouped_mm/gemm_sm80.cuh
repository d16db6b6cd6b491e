// Host side of the sm80 kernel: tile shapes, choice between them, launch.
#pragma once

#include <algorithm>

#include "common/blocks_that_fit.h"
#include "common/processors.h"
#include "grouped_mm/device/gemm_sm80.cuh"
#include "grouped_mm/gemm_sm80.h"

namespace jgg {

// At most this many tiles exist, whatever the sizes are: each segment may begin and end a tile, and
// have a gap before it.
template <typename Config>
int64_t MostTiles(const GemmSm80& gemm) {
  const bool mm = gemm.product == GemmSm80::Product::kMm;
  const int64_t columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
  const int64_t tile_columns = IsGated(gemm.epilogue.activation) ? Config::kN / 2 : Config::kN;
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
cudaError_t LaunchConfig(cudaStream_t stream, const GemmSm80& gemm) {
  static KnownBlocks known{};
  constexpr int kBytes = sizeof(typename Config::SharedMemory);
  static_assert(kBytes <= kLeastSharedMemory);
  GemmSm80 ordered = gemm;
  if (gemm.order == GemmSm80::Order::kMatrices && gemm.groups <= 32) {
    int blocks = 0;
    if (cudaError_t error =
            BlocksThatFit(reinterpret_cast<const void*>(device::GemmSm80Kernel<Config>),
                          Config::kThreads, kBytes, known, &blocks)) {
      return error;
    }
    ordered.longest_first = MostTiles<Config>(gemm) > blocks;
  }
  return LaunchTiles<Config>(stream, device::GemmSm80Kernel<Config>, ordered, ordered, kBytes,
                             known);
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
  static constexpr int64_t kSmallBelow = kTf32 ? 4 * kH200Processors : 128;  // tiles of 64 x 64
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
  static constexpr int64_t kSmallBelow = 4 * kH200Processors;
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

template <typename Element, bool kAKMajor, bool kBKMajor>
cudaError_t LaunchGemmSm80Instance(cudaStream_t stream, const GemmSm80& gemm) {
  using Configs = ConfigsSm80<Element, kAKMajor, kBKMajor>;
  constexpr int64_t kLow = Configs::Low::kM, kMedium = Configs::Medium::kM;
  constexpr int64_t kMediumBelow = 4 * kH200Processors;  // tiles of 128 x 128
  const int64_t rows = TypicalRows<Element>(gemm, kLow);
  if (rows <= kLow) return LaunchConfig<typename Configs::Low>(stream, gemm);
  if (Tiles(gemm, 64, 64) < Configs::kSmallBelow) {
    return LaunchConfig<typename Configs::Small>(stream, gemm);
  }
  if (rows <= kMedium || Tiles(gemm, 128, 128) < kMediumBelow) {
    return LaunchConfig<typename Configs::Medium>(stream, gemm);
  }
  return LaunchConfig<typename Configs::Large>(stream, gemm);
}

}  // namespace jgg

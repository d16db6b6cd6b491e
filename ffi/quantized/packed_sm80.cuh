// Host side of device/packed_sm80.cuh and device/packed_few_rows_sm80.cuh: tiles, choice, launch.
#pragma once

#include <algorithm>

#include "grouped_mm/device/warp_results_sm80.cuh"
#include "grouped_mm/gemm_sm80.cuh"
#include "quantized/device/packed_few_rows_sm80.cuh"
#include "quantized/device/packed_sm80.cuh"
#include "quantized/packed_sm80.h"

namespace jgg {

template <typename Config>
cudaError_t LaunchPackedTiles(cudaStream_t stream, const PackedGemmSm80& packed) {
  static_assert(kBytesSm80<Config> <= kLeastSharedMemory);
  static KnownBlocks known{};
  const auto kernel = device::PackedSm80Kernel<Config, device::WarpResults<Config>>;
  return LaunchTiles<Config>(
      stream, kernel,
      device::MakePacked<Config>(packed.gemm, packed.packed, packed.scales, packed.global_scale),
      packed.gemm, kBytesSm80<Config>, known);
}

template <typename Config>
cudaError_t LaunchPackedFewRows(cudaStream_t stream, const PackedGemmSm80& packed) {
  static_assert(kBytesSm80<Config> <= kLeastSharedMemory);
  static KnownBlocks known{};
  device::PackedFewRowsSm80 of{};
  of.gemm.gemm = packed.gemm;
  of.gemm.w.global_scale = packed.global_scale;
  of.packed = packed.packed;
  of.scales = packed.scales;
  return LaunchTiles<Config>(stream, device::PackedFewRowsSm80Kernel<Config>, of, packed.gemm,
                             kBytesSm80<Config>, known);
}

// Wide tiles of one block, or low ones of two; few rows.
template <Mode kMode, DType kX>
struct PackedConfigsSm80 {
  using Weights = device::PackedTiles<kMode, 4, kX>;
  using Wide = device::PackedConfig<Weights, 128, 256, 3, 1, 128>;
  using Low = device::PackedConfig<Weights, 64, 256, 3, 2, 128>;
  using Few = device::PackedFewRowsConfig<Weights, 8, 4>;
};

// Rows of a segment, on average, up to which tiles have 8 rows, and up to which low ones are faster
// than wide ones. From measurements on an H200: docs/lab/packed_sm80.md.
constexpr int64_t kPackedFewUpToRows = 8, kPackedLowUpToRows = 512;

// How many tiles there may be: a segment but the last leaves half a tile empty on average.
template <typename Config>
int64_t PackedTilesOf(const GemmSm80& gemm) {
  const int64_t rows = (gemm.rows_y + Config::kM - 1) / Config::kM + (gemm.metadata.count - 1) / 2;
  return rows * ((gemm.n + Config::kN - 1) / Config::kN);
}

template <Mode kMode, DType kX>
cudaError_t LaunchPackedInstanceSm80(cudaStream_t stream, const PackedGemmSm80& packed) {
  using Configs = PackedConfigsSm80<kMode, kX>;
  using Few = typename Configs::Few;
  using Low = typename Configs::Low;
  using Wide = typename Configs::Wide;
  const int64_t count = std::max<int64_t>(packed.gemm.metadata.count, 1);
  const int64_t rows = (packed.gemm.rows_y + count - 1) / count, processors = Processors();
  // Also where all tiles of few rows run at a time, which takes no longer than one of more rows.
  if (rows <= kPackedFewUpToRows ||
      PackedTilesOf<Few>(packed.gemm) <= Few::kBlocksPerSm * processors) {
    return LaunchPackedFewRows<Few>(stream, packed);
  }
  // Two low blocks need more shared memory than some GPUs have, and one alone has few warps. Where
  // wide tiles are about as many as processors, low ones would leave some processors idle.
  const bool two = 2 * (kBytesSm80<Low> + kSystemSharedMemory) <= ProcessorSharedMemory();
  const int64_t wide = PackedTilesOf<Wide>(packed.gemm);
  const bool low = rows <= (two ? kPackedLowUpToRows : Low::kM) &&
                   !(two && wide > processors / 2 && wide <= processors);
  if (low) return LaunchPackedTiles<Low>(stream, packed);
  return LaunchPackedTiles<Wide>(stream, packed);
}

}  // namespace jgg

// Weights in layout "sm90" (quantized/gemm_sm90.h) on their way to a stage.
#pragma once

#include <cstdint>

#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/adapter_sm90.cuh"
#include "quantized/device/few_rows_sm90.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

template <Mode kMode, int kBits, DType kX = DType::kBF16>
struct PackedWeights : PackedTiles<kMode, kBits, kX> {
  using Tiles = PackedTiles<kMode, kBits, kX>;
  using Tiles::kTileCodes, Tiles::kTileScales, Tiles::TileScales;
  using typename Tiles::Codes;
  static constexpr int kMostRows = 192;         // of a tile, that registers allow, and three stages
  static constexpr bool kTakesAdapters = true;  // beside many rows
  static constexpr bool kScalesSums = false;
  static constexpr int kBlocksPerSm = rules::kPackedBlocksPerSm;  // where there are few rows
  static constexpr int kBlocksOf64 = kBits <= 4 ? 2 : 1;  // ... and of up to 64, with three stages
  // Whether there are tiles of 16 rows and two blocks of columns: where codes take few registers.
  static constexpr bool kSixteens = kMode == Mode::kNvfp4 && kX == DType::kBF16;
  static constexpr bool kAlwaysWarps = FormatTraits<kMode, kBits>::kPackedByWarps;
  static constexpr int kLoadsLateFrom = Codes::kLoadsLateFrom;
  static constexpr int kFewRowsSlices = kBits < 8 ? 4 : 2;       // of a stage where warps multiply
  static constexpr int kSmallTilesKib = 228, kFewRowsKib = 228;  // of shared memory: all
  // Bytes of 64 columns: codes and scales of 128 k.
  static constexpr int kCodeBytes = 2 * kTileCodes;
  static constexpr int kScaleBytes = Codes::kStageScales;

  // One thread, for one warpgroup's columns.
  template <typename Config>
  __device__ static void CopyColumns(const QuantizedGemmSm90& quantized,
                                     typename Config::SharedMemory& memory, int group) {
    const bool gated = IsGated(quantized.gemm.epilogue.activation);
    const int half = quantized.gemm.n / 128;  // tiles from a gate to what it lets through
    const int tiles = gated ? half : quantized.packed.column_tiles;
    const int tile_scales = TileScales(quantized.packed);
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) {
      const int column = work.out_column / 64 + group;
      const bool exists = column < tiles;  // of the last 128 columns there may be only 64
      const int64_t first =
          (static_cast<int64_t>(work.weight) * quantized.packed.column_tiles + column) *
          quantized.packed.k_tiles;
      const char* codes = static_cast<const char*>(quantized.packed.codes) + first * kTileCodes;
      const char* scales = static_cast<const char*>(quantized.scales) + first * tile_scales;
      const int64_t block = static_cast<int64_t>(half) * quantized.packed.k_tiles;
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += 2) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        ArriveExpecting(full, exists ? Config::kBlocks * (kCodeBytes + 2 * tile_scales) : 0);
        // Half a stage is filled up with the same weights again, which meet zeros of x.
        const int copies = slice + 1 < work.slices ? 1 : 2, tiles_each = 2 / copies;
        for (int i = 0; i < (exists ? copies : 0); ++i) {
#pragma unroll
          for (int b = 0; b < Config::kBlocks; ++b) {
            CopyTiles(codes + b * block * kTileCodes, scales + b * block * tile_scales, full,
                      memory.codes[at.index][b][group] + i * kTileCodes,
                      memory.scales[at.index][b][group] + i * tile_scales, tiles_each, tile_scales);
          }
        }
        codes += kCodeBytes;
        scales += 2 * tile_scales;
        at.Next();
      }
      if constexpr (Config::kAdapters) {
        if (HasAdapter(quantized, work)) PassAdapter<Config>(memory, at);
      }
    });
  }

  // Few rows: one thread copies all of a stage, x too, by as few copies as there can be, because
  // issuing instructions is what takes the time.
  template <typename Config>
  struct StageCopier {
    const QuantizedGemmSm90& quantized;
    const bool halves;
    const int half;   // tiles from a gate to what it lets through
    const int tiles;  // of columns
    const int tile_scales;
    const int64_t block;

    __device__ explicit StageCopier(const QuantizedGemmSm90& of)
        : quantized(of),
          halves(Config::kHalves || IsGated(of.gemm.epilogue.activation)),
          half(of.gemm.n / 128),
          tiles(halves ? half : of.packed.column_tiles),
          tile_scales(TileScales(of.packed)),
          block(static_cast<int64_t>(half) * of.packed.k_tiles) {}

    // All stages of a tile of work.
    __device__ void Copy(typename Config::SharedMemory& memory, const Work& work,
                         Place<Config::kStages>& at) const {
      const int column = work.out_column / 64;
      const int groups = min(2, tiles - column);  // of the last 128 columns there may be only 64
      int k_tile = work.l_k / kSliceSm90;
      const int64_t first =
          (static_cast<int64_t>(work.weight) * quantized.packed.column_tiles + column) *
              quantized.packed.k_tiles +
          k_tile;
      const char* codes = static_cast<const char*>(quantized.packed.codes) + first * kTileCodes;
      const char* scales = static_cast<const char*>(quantized.scales) + first * tile_scales;
      const CUtensorMap* l_map = Config::BoxMap(quantized.gemm, work.rows);
      const int most_slices = Config::StageSlices(work.rows);
      const int rows_bytes = most_slices * Config::SliceBytes(work.rows);
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += most_slices) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        ArriveExpecting(
            full, rows_bytes + most_slices * groups * Config::kBlocks * (kTileCodes + tile_scales));
        CopyBox<false>(l_map, full, memory.l[at.index], 0, work.l_row, k_tile);
        const int slices = min(most_slices, work.slices - slice);
#pragma unroll
        for (int i = 0; i < 2 * Config::kBlocks; ++i) {
          const int group = i % 2, b = i / 2;
          if (group >= groups) continue;
          const int64_t tile = b * block + group * quantized.packed.k_tiles;
          char* to = memory.codes[at.index][b][group];
          char* scales_to = memory.scales[at.index][b][group];
          CopyTiles(codes + tile * kTileCodes, scales + tile * tile_scales, full, to, scales_to,
                    slices, tile_scales);
          // The rest of the last stage has the same weights again, which meet zeros of x: as many
          // tiles as share scales.
          const int together = Config::Weights::TilesTogether(quantized.packed);
#pragma unroll 1
          for (int s = slices; s < most_slices; s += together) {
            CopyTiles(codes + tile * kTileCodes, scales + tile * tile_scales, full,
                      to + s * kTileCodes, scales_to + s * tile_scales, together, tile_scales);
          }
        }
        codes += most_slices * kTileCodes;
        scales += most_slices * tile_scales;
        k_tile += most_slices;
        at.Next();
      }
    }
  };

  template <typename Config>
  __device__ static void CopyStages(const QuantizedGemmSm90& quantized,
                                    typename Config::SharedMemory& memory) {
    const StageCopier<Config> copier(quantized);
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) { copier.Copy(memory, work, at); });
  }

  // Tiles that share scales.
  __device__ static int TilesTogether(const PackedCodesSm90& packed) {
    return kTileScales <= TileScales(packed) ? 1 : 2;
  }

  // Whether stages may do with ScaleRange::kSmall.
  static bool AsksForSmall(const QuantizedGemmSm90& quantized) {
    return Tiles::kHasSmall && quantized.packed.tile_scales <= kTileScales;
  }

 private:
  // `count` tiles' codes and scales, to one stage.
  __device__ static void CopyTiles(const char* codes, const char* scales, uint64_t* full, char* to,
                                   char* scales_to, int count, int tile_scales) {
    CopyBytes(codes, full, to, count * kTileCodes);
    CopyBytes(scales, full, scales_to, count * tile_scales);
  }
};

}  // namespace jgg::device

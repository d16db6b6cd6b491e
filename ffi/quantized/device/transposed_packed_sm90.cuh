// Weights in layout "sm90" for x (T, N) @ W (N, K), K quantized: see transposed_sm90.cuh. A tile of
// W has 64 n x 64 k, decoded as for x (T, K) @ W^T. A slice has two tiles that lie beside each
// other along k, one for each warpgroup.
#pragma once

#include <cstdint>

#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/adapter_sm90.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"

namespace jgg::device {

// How tiles come to a stage: PackedTiles, or ScaledWeights (transposed_scaled_sm90.cuh).
template <typename Tiles_>
struct TransposedTiles {
  using Tiles = Tiles_;
  static constexpr DType kX = Tiles::kX;
  static constexpr bool kScaled = Tiles::kScaled;
  static constexpr float kFactor = Tiles::kFactor;
  static constexpr int kCodeBytes = 2 * Tiles::kTileCodes;  // of a slice: those of two tiles
  static constexpr int kCodesAligned = 128;                 // bytes
  static constexpr int kCopiers = 2;          // threads, beside that of x: of codes, and of scales
  static constexpr bool kHasEpilogue = true;  // few rows: a warpgroup's columns are neighbours
  static constexpr bool kTurns = true;        // few rows: what is decoded has k along a pair
  struct NoPlaces {};
  template <bool kFew>
  using Places = NoPlaces;                      // scales come with a stage
  static constexpr bool kStagesScales = false;  // ... by the thread that copies codes

  // The codes and scales of a tile of work, for the threads that copy them.
  struct Columns {
    const char *codes, *scales;
    int tiles, tile_scales;           // tiles of 64 columns
    int64_t next_codes, next_scales;  // bytes from a slice of n to the next

    __device__ Columns(const QuantizedGemmSm90& quantized, const Work& work) {
      const PackedCodesSm90& packed = quantized.packed;
      const int column = work.out_column / 64;
      tile_scales = Tiles::TileScales(packed);
      const int64_t first =
          static_cast<int64_t>(work.weight) * packed.column_tiles * packed.k_tiles + column;
      codes = static_cast<const char*>(packed.codes) + first * Tiles::kTileCodes;
      scales = static_cast<const char*>(quantized.scales) + first * tile_scales;
      tiles = max(0, min(2, packed.k_tiles - column));
      next_codes = static_cast<int64_t>(packed.k_tiles) * Tiles::kTileCodes;
      next_scales = static_cast<int64_t>(packed.k_tiles) * tile_scales;
    }

    __device__ int Bytes() const { return tiles * (Tiles::kTileCodes + tile_scales); }

    // By the thread that copies all of a slice.
    __device__ void Copy(uint64_t* full, char* to_codes, char* to_scales) const {
      if (tiles == 0) return;
      CopyBytes(codes, full, to_codes, tiles * Tiles::kTileCodes);
      CopyBytes(scales, full, to_scales, tiles * tile_scales);
    }

    __device__ void Next() {
      codes += next_codes;
      scales += next_scales;
    }
  };

  // Many rows: thread `kWhich` of those that copy.
  template <typename Config, int kWhich>
  __device__ static void CopyThread(const QuantizedGemmSm90& quantized,
                                    typename Config::SharedMemory& memory) {
    constexpr bool kScales = kWhich == 1;
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) {
      const Columns columns(quantized, work);
      const char* from = kScales ? columns.scales : columns.codes;
      const int64_t next = kScales ? columns.next_scales : columns.next_codes;
      const int bytes = columns.tiles * (kScales ? columns.tile_scales : Tiles::kTileCodes);
#pragma unroll 1
      for (int slice = 0; slice < work.slices; ++slice) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        ArriveExpecting(full, bytes);
        if (bytes > 0) {
          CopyBytes(from, full, kScales ? memory.scales[at.index][0] : memory.codes[at.index][0],
                    bytes);
        }
        from += next;
        at.Next();
      }
      if constexpr (Config::kAdapters) {
        if (HasAdapter(quantized, work)) PassAdapter<Config>(memory, at);
      }
    });
  }
};

template <Mode kMode, int kBits, DType kX>
struct TransposedPacked : TransposedTiles<PackedTiles<kMode, kBits, kX>> {
  using typename TransposedTiles<PackedTiles<kMode, kBits, kX>>::Tiles;
  static constexpr bool kTakesAdapters = true;  // beside many rows
  // Few rows: whether stages may do with ScaleRange::kSmall.
  static constexpr bool kAsksForSmall =
      Tiles::kHalf && Tiles::kHasSmall && !Tiles::Codes::kHasBiases;
  template <bool kFew>
  static constexpr int kScaleBytes = Tiles::Codes::kStageScales;  // of a slice

  // Few rows.
  template <int kSlices, int kEights>
  class Reader {
    using Of = typename Tiles::template Reader<2>;

   public:
    using Words = typename Of::Words;
    __device__ Reader(const QuantizedGemmSm90& quantized, const Work& work, int /*group*/)
        : reader_(quantized, work, 0) {}

    // Whether all scales of the warp's n are small, in a stage.
    template <int kStageSlices, int kBytes>
    __device__ bool AllSmall(const char (&scales)[kStageSlices][kBytes], int group) const {
      return reader_.AllSmall(scales[threadIdx.x % 32 / 8 % kStageSlices], group);
    }

    // Loads a warpgroup's columns of slice `s` of a stage.
    template <ScaleRange kRange>
    __device__ Words Load(const char* codes, const char* scales, int group, int /*s*/) const {
      return reader_.template Load<true, kRange>(codes, scales, group);
    }

    // 16 of the columns, from step `first` of four on.
    template <ScaleRange kRange>
    __device__ void Read(const Words& words, int group, int first, uint32_t* a) const {
      reader_.template Read<1, true, kRange>(words, group, first, a);
    }

   private:
    const Of reader_;
  };

  // Many rows: decodes a slice, and writes it to shared memory.
  class Writer {
    using Of = typename Tiles::template Reader<2>;

   public:
    struct Words {
      uint32_t a[16];
    };

    // Lane l names a line of the 8 x 8 matrix l / 8 of four: n below 8, n from 8 on, and the same
    // of the next 8 k.
    template <typename Places>
    __device__ Writer(const QuantizedGemmSm90& quantized, const Work& work, int /*group*/, Places&)
        : reader_(quantized, work, 0),
          line_at_((threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16) * 128) {}

    __device__ Words Load(const char* codes, const char* scales, int group) const {
      constexpr ScaleRange kRange = Tiles::kHalf ? ScaleRange::kRounded : ScaleRange::kAny;
      const auto loaded = reader_.template Load<false, kRange>(codes, scales, group);
      Words words;
      reader_.template Read<4, false, kRange>(loaded, group, 0, words.a);
      return words;
    }

    // To the place of 64 lines, which are swizzled.
    __device__ void Write(const Words& words, char* to) const {
      const int lane = threadIdx.x % 32;
      const uint32_t (&a)[16] = words.a;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        StoreMatrices<false>(to + line_at_ + ((2 * i + lane / 16) ^ lane % 8) * 16, a[4 * i],
                             a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
      }
    }

   private:
    const Of reader_;
    const int line_at_;
  };
};

}  // namespace jgg::device

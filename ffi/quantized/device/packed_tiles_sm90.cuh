// Weights in layout "sm90" (quantized/gemm_sm90.h) in registers: what a warpgroup has of a tile of
// 64 columns x 64 k lies together, in the order in which its threads read it. Plain C++ on the
// host, too, as far as a kernel there needs it (tests/lib/direct_kernel.cc).
#pragma once

#include <cstdint>

#include "quantized/device/formats.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

struct ThreadOfWarpgroup {
  __device__ static int Get() { return threadIdx.x % 128; }
};

// The first tile of k of 64 columns.
struct PackedColumn {
  const char *codes, *scales;
};

// Tiles of 64 columns x 64 k, and how a thread reads them: as pairs of x's type, kX.
template <Mode kMode, int kBits, DType kX_ = DType::kBF16>
struct PackedTiles {
  using Codes = PackedCodes<kMode, kBits>;
  static constexpr DType kX = kX_;
  static constexpr bool kHalf = kX == DType::kF16;
  static constexpr bool kScaled = false;  // scales multiply sums: scaled_rows_sm90.cuh
  static constexpr bool kFloats = false;  // x is float32: scaled_lines_sm90.cuh
  static constexpr float kFactor = kHalf ? Codes::kHalfFactor : Codes::kFactor;
  static constexpr float kSmallFactor = kHalf ? kFactor : Codes::kSmallFactor;
  static constexpr bool kHasSmall = kHalf ? Codes::kHasSmallHalves : Codes::kHasSmall;
  static constexpr int kTileCodes = 512 * kBits, kTileScales = Codes::kTileScales;  // bytes

  // Bytes of a tile's scales, or of half of two tiles' that share them.
  __device__ static int TileScales(const PackedCodesSm90& packed) {
    return Codes::TileScales(packed);
  }

  // The scales of two rows, as the decoder for x's type takes them.
  template <bool kFewRows, ScaleRange kRange, int kWords>
  __device__ static void LoadScalesOf(const char* scales, int tile_scales,
                                      uint32_t (&words)[kWords][2]) {
    if constexpr (kHalf) {
      Codes::template LoadHalfScales<kFewRows, kRange>(scales, tile_scales, words);
    } else {
      Codes::template LoadScales<kFewRows, kRange>(scales, tile_scales, words);
    }
  }

  // Where a weight's tiles of 64 columns lie.
  __device__ static PackedColumn ColumnOf(const PackedCodesSm90& packed, const void* scales,
                                          int weight, int column_tile) {
    const int64_t tile =
        (static_cast<int64_t>(weight) * packed.column_tiles + column_tile) * packed.k_tiles;
    return {static_cast<const char*>(packed.codes) + tile * kTileCodes,
            static_cast<const char*>(scales) + tile * TileScales(packed)};
  }

  // Where a thread has its words of the first tile of k of a column, and of which warpgroup's
  // thread they are.
  struct ThreadColumn {
    // Pieces of several sizes lie apart, each at a place of its own.
    static constexpr bool kOnePlace = kBits == 2 || kBits == 4 || kBits == 8;

    const char *codes, *scales;
    uint32_t number;

    ThreadColumn() = default;
    __device__ ThreadColumn(const PackedColumn& column, uint32_t number)
        : codes(column.codes + (kOnePlace ? number * (kBits == 2 ? 8 : 16) : 0)),
          scales(column.scales + (number / 32 * 8 + number % 32 / 4) * (kTileScales / 32)),
          number(kOnePlace ? 0 : number) {}

    // A tile's words, or those of the same thread so many warps further. Two tiles may share
    // scales.
    template <typename Words>
    __device__ void Load(int tile_scales, uint32_t tile, int warps, Words& words) const {
      const int thread = 32 * warps + (kOnePlace ? 0 : static_cast<int>(number));
      LoadCodes(codes + tile * kTileCodes, thread, words.codes);
      const uint32_t shared = tile % 2 == 0 ? 0 : max(kTileScales - tile_scales, 0);
      LoadScalesOf<true, ScaleRange::kAny>(
          scales + (tile * static_cast<uint32_t>(tile_scales) - shared) + warps * (kTileScales / 4),
          tile_scales, words.scales);
    }
  };

  // A thread's reader of a tile's columns, from stages of so many slices. Thread::Get() is its
  // number in a warpgroup that reads all of them.
  template <int kStageSlices, typename Thread = ThreadOfWarpgroup>
  class Reader {
   public:
    template <typename Gemm, typename Work>
    __device__ Reader(const Gemm& quantized, const Work&, int /*column*/)
        : Reader(TileScales(quantized.packed)) {}
    __device__ explicit Reader(int tile_scales) : tile_scales_(tile_scales) {}

    // All that the thread decodes of a slice.
    struct Words {
      uint32_t codes[kBits], scales[Codes::kMostScaleWords][2];

      __device__ uint32_t OfEachLoad() const {
        return codes[0] | codes[kBits - 1] | scales[Codes::kMostScaleWords - 1][0];
      }
    };

    // Whether all scales of the warp's columns are small, in a stage, of which each lane looks at a
    // slice.
    __device__ bool AllSmall(const char* scales) const {
      return AllSmall(scales, threadIdx.x % 32 / 8 % kStageSlices);
    }
    __device__ bool AllSmall(const char* scales, int slice) const {
      scales = At(scales, slice, threadIdx.x % 128 / 32 * 8 + threadIdx.x % 8);
      const uint32_t bits = kHalf ? Codes::NotSmallHalfBits(scales) : Codes::NotSmallBits(scales);
      return __all_sync(~0u, bits == 0);
    }

    // From slice `slice` of a stage on.
    template <bool kFewRows, ScaleRange kRange>
    __device__ Words Load(const char* codes, const char* scales, int slice) const {
      const int thread = Thread::Get(), pair = thread / 32 * 8 + thread % 32 / 4;
      Words words;
      LoadCodes(codes + slice * kTileCodes, thread, words.codes);
      LoadScalesOf<kFewRows, kRange>(At(scales, slice, pair), tile_scales_, words.scales);
      return words;
    }

    // kSteps x 16 k from step `first` of a slice on.
    template <int kSteps, bool kFewRows, ScaleRange kRange>
    __device__ void Read(const Words& words, int /*slice*/, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (kHalf) {
          Codes::template DecodeHalf<kFewRows, kRange>(words.codes, first + i, words.scales,
                                                       a + 4 * i);
        } else {
          Codes::template Decode<kFewRows, kRange>(words.codes, first + i, words.scales, a + 4 * i);
        }
      }
    }

   private:
    // Where those of a pair of rows are.
    __device__ const char* At(const char* scales, int slice, int pair) const {
      scales += slice * tile_scales_ + kTileScales / 32 * pair;
      // Two tiles may share them.
      return slice % 2 == 0 ? scales : scales - max(kTileScales - tile_scales_, 0);
    }

    const int tile_scales_;
  };
};

}  // namespace jgg::device

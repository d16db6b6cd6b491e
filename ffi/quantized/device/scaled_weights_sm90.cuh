// Weights in layout "sm90" that are not rounded: codes are multiplied as whole numbers (or as
// numbers of 8 bits), which bfloat16 holds, and float32 scales multiply sums over the k that share
// them, or over 32 of these. A bias multiplies the sum of x over the same k. So groups may have 16
// codes, scales may be float32, and x may be parts of float32 numbers: sums are as exact as
// float32's. scaled_rows_sm90.cuh and scaled_tiles_sm90.cuh are the kernels.
#pragma once

#include <cstdint>

#include "quantized/device/packed_weights_sm90.cuh"

namespace jgg::device {

template <typename Config>
struct ScaledRowsProducts;

template <Mode kMode, int kBits>
struct ScaledWeights : PackedWeights<kMode, kBits> {
  using Base = PackedWeights<kMode, kBits>;
  using typename Base::Codes;
  static constexpr bool kScaled = true, kHasSmall = false;
  static constexpr int kBlocksPerSm = 1;  // sums of 16 or 32 k need registers
  static constexpr float kFactor = 1, kSmallFactor = 1;
  static constexpr int kScaleBytes = Codes::kMostFloatScales;
  static constexpr int kWords = kBits;  // of a thread's codes of a tile
  template <typename Config>
  using RowsProducts = ScaledRowsProducts<Config>;

  // Tiles that share scales.
  __device__ static int TilesTogether(const PackedCodesSm90& packed) {
    return packed.tiles_share ? 2 : 1;
  }

  // A thread's reader of a tile's columns: its own and the one 8 further on.
  class Reader {
   public:
    __device__ explicit Reader(const PackedCodesSm90& packed) : packed_(packed) {}

    // A slice of a stage.
    __device__ void Load(const char* codes, int slice, uint32_t (&words)[kWords]) const {
      LoadCodes(codes + slice * Base::kTileCodes, static_cast<int>(threadIdx.x % 128), words);
    }

    // The scales and biases of both columns and 16 k of a slice. The result is some of their bits.
    template <PackedFloats kFloats = PackedFloats::kAny>
    __device__ uint32_t Scales(const char* scales, int slice, int step, float (&scale)[2],
                               float (&bias)[2]) const {
      const int tile = packed_.tiles_share ? slice / 2 * 2 : slice;
      const int pair = threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4;
      const int group = step * packed_.tile_groups / 4;
      const char* from = scales + tile * Base::TileScales(packed_);
      return Codes::template FloatScales<kFloats>(from, group * 32 + pair, packed_, scale, bias);
    }

   private:
    const PackedCodesSm90& packed_;
  };
};

}  // namespace jgg::device

// Weights in layout "sm90" (quantized/gemm_sm90.h) in registers: what a warpgroup has of a tile of
// 64 columns x 64 k lies together, in the order in which its threads read it. Plain C++ on the
// host, too, as far as a kernel there needs it (tests/lib/direct_kernel.cc).
#pragma once

#include <cstdint>

#include "quantized/device/packed_codes.cuh"
#include "quantized/device/registers_sm90.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

// e2m1: the sign and the three other bits of a code where bfloat16 has its sign and the last bit of
// its exponent and the first two of its mantissa (bits 15 and 8-6): 2^-126 times the value,
// subnormals included. How four codes share 16 bits was searched for: no other way takes fewer
// operations than these nine. One after another, sign and others are in bits 15 8-6, 9 2-0, 3 12-10
// (of the other half) and 13 14 5-4.
__device__ inline void E2M1Pairs(uint32_t codes, uint32_t* pairs) {
  constexpr uint32_t kBoth = 0x81c081c0;
  pairs[0] = codes & kBoth;
  pairs[1] = codes << 6 & kBoth;
  pairs[2] = FunnelLeft(codes, codes, 12) & kBoth;
  pairs[3] = (codes << 2 & 0x80c080c0) | (codes >> 6 & 0x01000100);
}

// e4m3: the sign and the other bits where bfloat16 has its sign, the last four bits of its exponent
// and the first three of its mantissa (bits 15 and 10-4): 2^-120 times the value, subnormals
// included. Four pairs share two words: the third has its first five bits in the first word (bits
// 3, of the other half, and 14-11) and its last three in the second (2-0), the fourth likewise.
__device__ inline void E4M3Pairs(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  constexpr uint32_t kAll = 0x87f087f0, kHigh = 0x87808780, kLast = 0x00700070;
  const auto rotate = [](uint32_t word, int left) { return FunnelLeft(word, word, left); };
  pairs[0] = first & kAll;
  pairs[1] = second & kAll;
  pairs[2] = MaskOr(rotate(second, 4), kLast, rotate(first, 28) & kHigh);
  pairs[3] = MaskOr(rotate(first, 4), kLast, rotate(second, 28) & kHigh);
}

// A mode's decoder: from a thread's codes of a tile and the scales of its two rows. A row has up to
// kMostScaleWords words for these.
template <Mode kMode, int kBits>
struct PackedCodes;

// The members that most of these decoders share.
struct PackedCodesBase {
  static constexpr float kFactor = 1, kSmallFactor = 1;  // of sums, and where scales are kSmall
  static constexpr bool kHasSmall = false;
  static constexpr int kMostScaleWords = 1;
};

// Scales are e4m3 with one more bit of exponent, so that all are normal: (exponent + 10) * 8 +
// mantissa, and 255 for NaN; where one is 0, so are codes. Values are 2^-19 of what they stand for.
template <>
struct PackedCodes<Mode::kNvfp4, 4> : PackedCodesBase {
  static constexpr float kFactor = 0x1p19f;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[4], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E2M1Pairs(codes[step], pairs);
    const uint32_t s = Scale<kFewRows>(scales[0][0], step);
    const uint32_t s8 = Scale<kFewRows>(scales[0][1], step);
    a[0] = Multiply2(pairs[0], s);
    a[1] = Multiply2(pairs[1], s8);
    a[2] = Multiply2(pairs[2], s);
    a[3] = Multiply2(pairs[3], s8);
  }

 private:
  // 2^107 times the scale, twice: made for two steps at a time.
  template <bool kFewRows>
  __device__ static uint32_t Scale(uint32_t bytes, int step) {
    const uint32_t two = Permute(bytes, 0, step < 2 ? 0x4140 : 0x4342);
    return Twice(two * PowerOfTwo<kFewRows>(4) + 0x70007000, step % 2);
  }
};

// The scales of both rows are one word of e8m0: a row's first 32 k, and the 32 after.
template <>
struct PackedCodes<Mode::kMxfp4, 4> : PackedCodesBase {
  static constexpr bool kHasSmall = true;

  // As bfloat16, those of row `r`.
  template <bool kFewRows, ScaleRange kRange>
  __device__ static uint32_t Scale(uint32_t bytes, int r) {
    const uint32_t two = Permute(bytes, 0, r == 0 ? 0x4140 : 0x4342);
    const uint32_t power = PowerOfTwo<kFewRows>(7);
    if constexpr (kRange == ScaleRange::kSmall) return two * power + 126 * 0x800080;
    // 0, of 2^-127, is subnormal; 255 is infinite so far, which times 0 is NaN.
    const uint32_t normal = two * power;
    return MultiplyAdd2<DType::kBF16>(normal, 0, Max2<DType::kBF16>(normal, 0x400040));
  }

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void Decode(const uint32_t (&codes)[4], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    E2M1Pairs(codes[step], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = MultiplyMxfp4<kRange>(a[i], Twice(scales[0][i % 2], step / 2));
    }
  }
};

// Scales are bfloat16, one for every 32 k. Code 127 would be 480: of a group that has it the scale
// is NaN.
template <>
struct PackedCodes<Mode::kMxfp8, 8> : PackedCodesBase {
  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[8], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Multiply2(Multiply2(pairs[i], k2To120), Twice(scales[0][i % 2], step / 2));
    }
  }
};

// A scale is the sum of two bfloat16 numbers, the upper half of a word the smaller one, for every
// 128 k. They are 2^88 times what they stand for, so that a code is brought back by the product
// that scales it, and values are 2^-32 of what they stand for. Code 127 as for mxfp8.
template <>
struct PackedCodes<Mode::kFp8, 8> : PackedCodesBase {
  static constexpr float kFactor = 0x1p32f;

  template <bool kFewRows, ScaleRange>
  __device__ static void Decode(const uint32_t (&codes)[8], int step,
                                const uint32_t (&scales)[1][2], uint32_t* a) {
    uint32_t pairs[4];
    E4M3Pairs(codes[2 * step], codes[2 * step + 1], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = scales[0][i % 2], rest = Multiply2(pairs[i], Twice(both, 1));
      a[i] = MultiplyAdd2<DType::kBF16>(pairs[i], Twice(both, 0), rest);
    }
  }
};

// A word of scales is scale and bias, bfloat16, of 64 or 128 k, or of 32 where there are two: then
// they are not small.
template <int kBits>
struct PackedCodes<Mode::kAffine, kBits> : PackedCodesBase {
  static constexpr bool kHasSmall = kBits < 8;
  static constexpr float kSmallFactor = 0x1p8f;
  static constexpr int kMostScaleWords = 2;

  template <bool kFewRows, ScaleRange kRange>
  __device__ static void Decode(const uint32_t (&codes)[kBits], int step,
                                const uint32_t (&scales)[2][2], uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = 4 * step + i;
      if constexpr (kRange == ScaleRange::kSmall) {
        const CodePair alone = PackedPairOf<kBits, kEndAlone>(codes, pair, 0);
        const uint32_t both = SmallScales(scales[0][i % 2], alone.place);
        a[i] = MultiplyAdd2<DType::kBF16>(alone.bits, Twice(both, 0), Twice(both, 1));
      } else {
        const uint32_t both = scales[step / 2][i % 2];
        a[i] =
            MultiplyAdd2<DType::kBF16>(PackedCodePair(codes, pair), Twice(both, 0), Twice(both, 1));
      }
    }
  }
};

struct ThreadOfWarpgroup {
  __device__ static int Get() { return threadIdx.x % 128; }
};

// The first tile of k of 64 columns.
struct PackedColumn {
  const char *codes, *scales;
};

// Tiles of 64 columns x 64 k, and how a thread reads them.
template <Mode kMode, int kBits>
struct PackedTiles {
  using Codes = PackedCodes<kMode, kBits>;
  static constexpr float kFactor = Codes::kFactor, kSmallFactor = Codes::kSmallFactor;
  static constexpr bool kHasSmall = Codes::kHasSmall;
  static constexpr bool kMxfp4 = kMode == Mode::kMxfp4, kFp8 = kMode == Mode::kFp8;
  // Bytes: codes, and one word of scales (or half a word).
  static constexpr int kTileCodes = 512 * kBits, kTileScales = kMxfp4 ? 128 : 256;

  // Bytes of a tile's scales, or of half of two tiles' that share them.
  __device__ static int TileScales(const PackedCodesSm90& packed) {
    if (kFp8) return kTileScales / 2;
    return Codes::kMostScaleWords == 1 ? kTileScales : packed.tile_scales;
  }

  // Where a weight's tiles of 64 columns lie.
  __device__ static PackedColumn ColumnOf(const PackedCodesSm90& packed, const void* scales,
                                          int weight, int column_tile) {
    const int64_t tile =
        (static_cast<int64_t>(weight) * packed.column_tiles + column_tile) * packed.k_tiles;
    return {static_cast<const char*>(packed.codes) + tile * kTileCodes,
            static_cast<const char*>(scales) + tile * TileScales(packed)};
  }

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

    // Whether all scales of the warp's columns are small, in a stage.
    __device__ bool AllSmall(const char* scales) const {
      const int lane = threadIdx.x % 32, pair = threadIdx.x % 128 / 32 * 8 + lane % 8;
      scales = At(scales, lane / 8 % kStageSlices, pair);
      uint32_t bits;
      if constexpr (kMxfp4) {
        bits = *reinterpret_cast<const uint32_t*>(scales) & kHighestOfBytes;
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(scales);
        bits = (NotSmall(two.x) | NotSmall(two.y)) & kHighest;
      }
      return __all_sync(~0u, bits == 0);
    }

    // From slice `slice` of a stage on.
    template <bool kFewRows, ScaleRange kRange>
    __device__ Words Load(const char* codes, const char* scales, int slice) const {
      const int thread = Thread::Get(), pair = thread / 32 * 8 + thread % 32 / 4;
      Words words;
      LoadCodes(codes + slice * kTileCodes, thread, words.codes);
      scales = At(scales, slice, pair);
      if constexpr (kMxfp4) {
        const uint32_t bytes = *reinterpret_cast<const uint32_t*>(scales);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          words.scales[0][r] = Codes::template Scale<kFewRows, kRange>(bytes, r);
        }
      } else {
        LoadWords<2>(scales, words.scales[0]);
        if constexpr (kMode == Mode::kAffine) {
          if constexpr (kRange == ScaleRange::kSmall) {
            words.scales[1][0] = words.scales[0][0];
          } else {  // the first again where there is no second
            LoadWords<2>(scales + max(tile_scales_ - kTileScales, 0), words.scales[1]);
          }
        }
      }
      return words;
    }

    // kSteps x 16 k from step `first` of a slice on.
    template <int kSteps, bool kFewRows, ScaleRange kRange>
    __device__ void Read(const Words& words, int /*slice*/, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Codes::template Decode<kFewRows, kRange>(words.codes, first + i, words.scales, a + 4 * i);
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

// What decoders of layout "sm90" make of tiles for float16 x, on the host, for test_half_tiles.py.
#include "cuda_on_host.h"
//
#include "quantized/device/formats.cuh"

using namespace jgg;
using namespace jgg::device;

namespace {

// A tile as (64, 64) float16: what each thread of a warpgroup decodes goes where WGMMA has its A
// operand's registers. 1 where all scales are small.
template <Mode kMode, int kBits, bool kFewRows, ScaleRange kRange>
bool Decode(const char* codes, const char* scales, int tile_scales, uint16_t* out) {
  using Codes = PackedCodes<kMode, kBits>;
  bool small = true;
  for (int thread = 0; thread < 128; ++thread) {
    uint32_t words[kBits], of[Codes::kMostScaleWords][2];
    LoadCodes(codes, thread, words);
    const int pair = thread / 32 * 8 + thread % 32 / 4;
    const char* mine = scales + Codes::kTileScales / 32 * pair;
    small &= Codes::NotSmallHalfBits(mine) == 0;
    Codes::template LoadHalfScales<kFewRows, kRange>(mine, tile_scales, of);
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      Codes::template DecodeHalf<kFewRows, kRange>(words, step, of, a);
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 2);
        std::memcpy(out + 64 * row + 16 * step + 8 * (i / 2) + 2 * (thread % 4), &a[i], 4);
      }
    }
  }
  return small;
}

}  // namespace

// Mode affine has codes of 2 bits. Way: scales of any size, the same with few rows, small scales.
extern "C" int half_tile(int mode, const char* codes, const char* scales, int tile_scales, int way,
                         uint16_t* out) {
  gridDim.z = 1;
  const auto decode = [&](auto of) {
    constexpr Mode kMode = decltype(of)::kMode;
    constexpr int kBits = decltype(of)::kBits;
    constexpr ScaleRange kAny = ScaleRange::kAny, kSmall = ScaleRange::kSmall;
    if (way == 0) return Decode<kMode, kBits, false, kAny>(codes, scales, tile_scales, out);
    if (way == 1) return Decode<kMode, kBits, true, kAny>(codes, scales, tile_scales, out);
    return Decode<kMode, kBits, true, kSmall>(codes, scales, tile_scales, out);
  };
  switch (static_cast<Mode>(mode)) {
    case Mode::kAffine: return decode(FormatOf<Mode::kAffine, 2>{});
    case Mode::kMxfp4: return decode(FormatOf<Mode::kMxfp4, 4>{});
    case Mode::kNvfp4: return decode(FormatOf<Mode::kNvfp4, 4>{});
    default: return -1;
  }
}

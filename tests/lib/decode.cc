// ffi/quantized/device/decode.cuh, packed_codes.cuh, streams.cuh and value_planes.cuh on the host,
// for test_decode.py.
#include "quantized/device/decode.cuh"
#include "quantized/device/packed_codes.cuh"
#include "quantized/device/streams.cuh"
#include "quantized/device/value_planes.cuh"

using namespace jgg;
using namespace jgg::device;

// The values of units of 32 codes, by Decode32 where `fast` and it can; how many it could. Halves:
// a unit has two scales and biases.
template <DType kTo>
static long Decode(const Coding& coding, const uint32_t* packed, const uint32_t* first,
                   const uint32_t* second, bool halves, long units, bool fast, uint32_t* out) {
  long decoded = 0;
  for (long unit = 0; unit < units; ++unit) {
    const uint32_t* words = packed + unit * coding.bits;
    const auto store = [&](int i, const Eight<kTo>& eight) {
      std::memcpy(out + (4 * unit + i) * Eight<kTo>::kWords, eight.words, sizeof(eight));
    };
    const auto load = [&](auto& to) { std::memcpy(to, words, sizeof(to)); };
    const long lower = halves ? 2 * unit : unit, higher = halves ? lower + 1 : unit;
    const ScaleBits bits{first[lower], second[lower], first[higher], second[higher], halves};
    if (fast && Decode32<kTo, 0>(MakeScales<kTo>(coding, bits), load, store)) {
      ++decoded;
      continue;
    }
    for (int i = 0; i < 4; ++i) {
      float values[8];
      for (int j = 0; j < 8; ++j) {
        const int number = 8 * i + j, bit = number * coding.bits;
        const uint32_t next = bit % 32 + coding.bits > 32 ? words[bit / 32 + 1] : 0;
        const uint32_t code =
            FunnelRight(words[bit / 32], next, bit % 32) & ((1u << coding.bits) - 1);
        const bool nvfp4 = coding.Facts().scale == ScaleType::kE4M3, upper = number >= 16;
        values[j] = nvfp4   ? DecodeOne(coding, code, upper ? bits.second : bits.first, 0)
                    : upper ? DecodeOne(coding, code, bits.third, bits.fourth)
                            : DecodeOne(coding, code, bits.first, bits.second);
      }
      store(i, Round8<kTo>(values));
    }
  }
  return decoded;
}

extern "C" long decode(int mode, int bits, int scale_dtype, int to, const uint32_t* packed,
                       const uint32_t* first, const uint32_t* second, int halves, long units,
                       int fast, uint32_t* out) {
  const Coding coding{static_cast<Mode>(mode), bits, static_cast<DType>(scale_dtype)};
  const auto decode = [&](auto to) {
    return Decode<to.value>(coding, packed, first, second, halves != 0, units, fast != 0, out);
  };
  switch (static_cast<DType>(to)) {
    case DType::kF32: return decode(std::integral_constant<DType, DType::kF32>{});
    case DType::kBF16: return decode(std::integral_constant<DType, DType::kBF16>{});
    case DType::kF16: break;
  }
  return decode(std::integral_constant<DType, DType::kF16>{});
}

static uint32_t Scaled(uint32_t pair, uint32_t both) {
  return MultiplyAdd2<DType::kBF16>(pair, (both & 0xffff) * 0x10001, (both >> 16) * 0x10001);
}

// A tile of layout "sm90", affine, as (64, 64) bfloat16: what each thread of a warpgroup decodes
// goes where WGMMA has its A operand's registers. Alone: by codes that are, 2^-8 times the values.
template <int kBits>
static void DecodeTile(const char* codes, const uint32_t* scales, int scale_words, int alone,
                       uint16_t* out) {
  for (int thread = 0; thread < 128; ++thread) {
    uint32_t words[kBits];
    LoadCodes(codes, thread, words);
    for (int pair = 0; pair < 16; ++pair) {
      const int step = pair / 4, i = pair % 4, row8 = i % 2;
      const int place = thread / 32 * 8 + thread % 32 / 4;
      const uint32_t both = scales[(scale_words - 1) * (step / 2) * 64 + 2 * place + row8];
      uint32_t values;
      if constexpr (kBits < 8) {
        const CodePair small = PackedPairOf<kBits, kEndAlone>(words, pair, 0);
        values = Scaled(small.bits, SmallScales(both, small.place));
      }
      if (!alone) values = Scaled(PackedCodePair(words, pair), both);
      const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * row8;
      std::memcpy(out + 64 * row + 16 * step + 8 * (i / 2) + 2 * (thread % 4), &values, 4);
    }
  }
}

extern "C" void decode_tile(int bits, const char* codes, const uint32_t* scales, int scale_words,
                            int alone, uint16_t* out) {
  switch (bits) {
    case 2: return DecodeTile<2>(codes, scales, scale_words, alone, out);
    case 3: return DecodeTile<3>(codes, scales, scale_words, alone, out);
    case 4: return DecodeTile<4>(codes, scales, scale_words, alone, out);
    case 5: return DecodeTile<5>(codes, scales, scale_words, alone, out);
    case 6: return DecodeTile<6>(codes, scales, scale_words, alone, out);
    case 8: return DecodeTile<8>(codes, scales, scale_words, alone, out);
  }
}

// Pairs of 32 codes as two bfloat16 each: affine ones as whole numbers, others times the power of
// two that streams.cuh names. Alone: 2^-8 times the numbers.
template <CodeType kCode, int kBits>
static void DecodeStreams(const uint32_t* packed, long units, int alone, uint32_t* out) {
  for (long unit = 0; unit < units; ++unit) {
    uint32_t words[kBits], streams[kBits];
    std::memcpy(words, packed + unit * kBits, sizeof(words));
    ToStreams(words, streams);
    for (int p = 0; p < 16; ++p) {
      uint32_t& pair = out[16 * unit + p];
      if constexpr (kCode == CodeType::kInteger) {
        pair = NumbersOf<kBits>(streams, p);
        if constexpr (kBits < 8) {
          const CodePair small = CodesOf<kBits, kEndAlone>(streams, p, 0);
          if (alone) pair = Scaled(small.bits, SmallScales(0x3f80, small.place));
        }
      } else if constexpr (kCode == CodeType::kE2M1) {
        pair = E2M1Of(streams, p);
      } else {
        pair = E4M3Of(streams, p);
      }
    }
  }
}

extern "C" void decode_streams(int mode, int bits, const uint32_t* packed, long units, int alone,
                               uint32_t* out) {
  LinearFormats::Dispatch(static_cast<Mode>(mode), bits, [&](auto format) {
    using Format = decltype(format);
    DecodeStreams<Format::kCode, Format::kBits>(packed, units, alone, out);
  });
}

// The same of affine codes as two float16 each.
template <int kBits>
static void DecodeHalfStreams(const uint32_t* packed, long units, uint32_t* out) {
  for (long unit = 0; unit < units; ++unit) {
    uint32_t words[kBits], streams[kBits];
    std::memcpy(words, packed + unit * kBits, sizeof(words));
    ToStreams(words, streams);
    for (int p = 0; p < 16; ++p) out[16 * unit + p] = HalfNumbersOf<kBits>(streams, p);
  }
}

extern "C" void decode_half_streams(int bits, const uint32_t* packed, long units, uint32_t* out) {
  switch (bits) {
    case 2: return DecodeHalfStreams<2>(packed, units, out);
    case 3: return DecodeHalfStreams<3>(packed, units, out);
    case 4: return DecodeHalfStreams<4>(packed, units, out);
    case 5: return DecodeHalfStreams<5>(packed, units, out);
    case 6: return DecodeHalfStreams<6>(packed, units, out);
    case 8: return DecodeHalfStreams<8>(packed, units, out);
  }
}

// Words of four e4m3 codes as four float16 each.
extern "C" void halves_of_e4m3(const uint32_t* words, long count, uint32_t* out) {
  for (long i = 0; i < 2 * count; ++i) out[i] = HalvesOfE4M3(words[i / 2], i % 2);
}

// Whether words of scale and bias are small.
extern "C" void are_small(const uint32_t* words, long count, uint8_t* out) {
  for (long i = 0; i < count; ++i) out[i] = (NotSmall(words[i]) & kHighest) == 0;
}

// (3, count) bfloat16 planes of float32 numbers, of which there are pairs.
extern "C" void planes_of_pairs(const float* values, long count, uint16_t* out) {
  for (long i = 0; i < count; i += 2) {
    uint32_t planes[kValuePlanes];
    PlanesOfPair(values[i], values[i + 1], planes);
    for (int plane = 0; plane < kValuePlanes; ++plane) {
      std::memcpy(out + plane * count + i, &planes[plane], 4);
    }
  }
}

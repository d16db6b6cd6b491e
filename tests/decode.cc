// ffi/quantized/device/decode.cuh on the host, for test_decode.py.
#include "quantized/device/decode.cuh"

using namespace jgg;
using namespace jgg::device;

// The values of units of 32 codes, by Decode32 where `fast` and it can; how many it could.
template <DType kTo>
static long Decode(const Coding& coding, const uint32_t* packed, const uint32_t* first,
                   const uint32_t* second, long units, bool fast, uint32_t* out) {
  long decoded = 0;
  for (long unit = 0; unit < units; ++unit) {
    const uint32_t* words = packed + unit * coding.bits;
    const auto store = [&](int i, const Eight<kTo>& eight) {
      std::memcpy(out + (4 * unit + i) * Eight<kTo>::kWords, eight.words, sizeof(eight));
    };
    const auto load = [&](auto& to) { std::memcpy(to, words, sizeof(to)); };
    if (fast && Decode32<kTo, 0>(MakeScales<kTo>(coding, first[unit], second[unit]), load, store)) {
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
        const bool upper = coding.mode == Mode::kNvfp4 && number >= 16;
        values[j] = DecodeOne(coding, code, upper ? second[unit] : first[unit], second[unit]);
      }
      store(i, Round8<kTo>(values));
    }
  }
  return decoded;
}

extern "C" long decode(int mode, int bits, int scale_dtype, int to, const uint32_t* packed,
                       const uint32_t* first, const uint32_t* second, long units, int fast,
                       uint32_t* out) {
  const Coding coding{static_cast<Mode>(mode), bits, static_cast<DType>(scale_dtype)};
  switch (static_cast<DType>(to)) {
    case DType::kF32: return Decode<DType::kF32>(coding, packed, first, second, units, fast, out);
    case DType::kBF16: return Decode<DType::kBF16>(coding, packed, first, second, units, fast, out);
    case DType::kF16: break;
  }
  return Decode<DType::kF16>(coding, packed, first, second, units, fast, out);
}

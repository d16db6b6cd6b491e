// ffi/quantized/device/values.cuh on the host, for test_dequantize_host.py.
#include "quantized/device/values.cuh"

using namespace jgg;
using namespace jgg::device;

// Units of 32 codes; how many were not decoded one by one.
template <typename Decoder>
static long Dequantize(DType scale_dtype, const uint32_t* packed, const UnitScales* scales,
                       bool halves, long units, void* out) {
  constexpr int kSize = Decoder::kTo == DType::kF32 ? 4 : 2;
  long decoded = 0;
  for (long unit = 0; unit < units; ++unit) {
    char* values = static_cast<char*>(out) + unit * 32 * kSize;
    uint32_t words[Decoder::kBits];
    std::memcpy(words, packed + unit * Decoder::kBits, sizeof(words));
    const auto store = [&](int i, const Eight<Decoder::kTo>& eight) {
      std::memcpy(values + i * sizeof(eight), eight.words, sizeof(eight));
    };
    if (Decoder::Decode(scale_dtype, words, scales[unit], halves, store)) {
      ++decoded;
      continue;
    }
    for (int i = 0; i < 32; ++i) {
      const uint32_t code = CodeAt<Decoder::kBits>(words, i);
      const uint32_t bits = Decoder::Value(scale_dtype, code, scales[unit], i >= 16);
      std::memcpy(values + i * kSize, &bits, kSize);
    }
  }
  return decoded;
}

extern "C" long dequantize(int mode, int bits, int scale_dtype, int to, int global, int halves,
                           const uint32_t* packed, const void* scales, long units, void* out) {
  const auto dtype = static_cast<DType>(scale_dtype);
  const Coding coding{static_cast<Mode>(mode), bits, dtype};
  const auto run = [&](auto decoder) {
    return Dequantize<decltype(decoder)>(dtype, packed, static_cast<const UnitScales*>(scales),
                                         halves != 0, units, out);
  };
  switch (static_cast<DType>(to)) {
    case DType::kF32: return DispatchDecoder<DType::kF32>(coding, global, run);
    case DType::kBF16: return DispatchDecoder<DType::kBF16>(coding, global, run);
    case DType::kF16: break;
  }
  return DispatchDecoder<DType::kF16>(coding, global, run);
}

// ffi/quantized/device/coders.cuh on the host, for test_quantize_host.py.
#include "quantized/device/coders.cuh"

using namespace jgg;
using namespace jgg::device;

namespace {

struct Arrays {
  const void* w;
  const float* global_scale;  // one for every `per_scale` elements
  long elements, group_size, per_scale;
  uint8_t *weight, *scales, *biases;
};

template <typename Coder>
long Quantize(const Arrays& arrays, bool exactly) {
  constexpr int kSize = Coder::kOf == DType::kF32 ? 4 : 2;
  constexpr int kScale = Coder::kBias ? kSize : 1;
  constexpr int kBytes = Coder::kBits * Coder::kCount / 8;
  const long lanes = arrays.group_size / Coder::kCount;
  long doubts = 0;
  for (long group = 0; group < arrays.elements / arrays.group_size; ++group) {
    typename Coder::X x[8];
    const long bytes = arrays.group_size * kSize;
    std::memcpy(x, static_cast<const char*>(arrays.w) + group * bytes, bytes);
    auto part = Coder::Of(x[0]);
    for (long i = 1; i < lanes; ++i) part = Coder::Join(part, Coder::Of(x[i]));
    Inverse inverse{1.0f, 0};
    if constexpr (Coder::kGlobal) {
      const long index = group * arrays.group_size / arrays.per_scale;
      inverse = MakeInverse<Coder::kOf>(arrays.global_scale[index]);
    }
    const auto made = Coder::Make(part, inverse);
    for (long i = 0; i < lanes; ++i) {
      uint32_t words[(kBytes + 3) / 4] = {};
      const bool doubt = Coder::Encode(x[i], made, kNvfp4Times, words);
      doubts += doubt;
      if (doubt || exactly) Coder::Exactly(x[i], made, words);
      Coder::Finish(made, words);
      std::memcpy(arrays.weight + (group * lanes + i) * kBytes, words, kBytes);
    }
    const uint32_t scale = Coder::Scale(made);
    std::memcpy(arrays.scales + group * kScale, &scale, kScale);
    if constexpr (Coder::kBias) {
      const uint32_t bias = Coder::Bias(made);
      std::memcpy(arrays.biases + group * kScale, &bias, kScale);
    }
  }
  return doubts;
}

}  // namespace

// How many times a lane was in doubt.
extern "C" long quantize(int mode, int bits, int dtype, const void* w, const float* global_scale,
                         long elements, long group_size, long per_scale, int exactly,
                         uint8_t* weight, uint8_t* scales, uint8_t* biases) {
  const Arrays arrays{w, global_scale, elements, group_size, per_scale, weight, scales, biases};
  const auto run = [&](auto coder) { return Quantize<decltype(coder)>(arrays, exactly); };
  const auto as = static_cast<Mode>(mode);
  const bool global = global_scale != nullptr;
  switch (static_cast<DType>(dtype)) {
    case DType::kF32: return DispatchCoder<DType::kF32>(as, bits, global, run);
    case DType::kBF16: return DispatchCoder<DType::kBF16>(as, bits, global, run);
    case DType::kF16: break;
  }
  return DispatchCoder<DType::kF16>(as, bits, global, run);
}

namespace {

template <int kDivisor>
long WrongQuotients() {
  long wrong = 0;
  for (uint32_t bits = 0x3f800000; bits < 0x40000000; ++bits) {
    wrong += DivideBy<kDivisor>(AsFloat(bits)) != AsFloat(bits) / kDivisor;
  }
  return wrong;
}

}  // namespace

// Quotients of every float32 between 1 and 2 by every divisor that DivideBy is used with.
extern "C" long wrong_quotients_by_constants() {
  return WrongQuotients<3>() + WrongQuotients<6>() + WrongQuotients<7>() + WrongQuotients<15>() +
         WrongQuotients<31>() + WrongQuotients<63>() + WrongQuotients<255>();
}

// Quotients of `count` random pairs of mantissas, from reciprocals as wrong as they may be.
// Divisors of few bits, such as scales in e4m3, need no refined reciprocals.
extern "C" long wrong_quotients(long count, uint64_t seed) {
  long wrong = 0;
  for (long i = 0; i < count; ++i) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    const float a = AsFloat(0x3f800000 | (seed & 0x7fffff));
    const float b = AsFloat(0x3f800000 | (seed >> 23 & 0x7fffff));
    const float few = AsFloat(AsBits(b) & 0xfff00000);
    const auto reciprocal = [&](float of) { return AsFloat(AsBits(1.0f / of) + i % 3 - 1); };
    wrong += Quotient(a, b, Refined(reciprocal(b), b)) != a / b;
    wrong += Quotient(a, few, reciprocal(few)) != a / few;
  }
  return wrong;
}

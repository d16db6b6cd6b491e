// ffi/fp8/device/quantize_block.cuh on the host, for test_fp8_quantize_host.py.
#include "fp8/device/quantize_block.cuh"

using namespace jgg::fp8::device;

namespace {

template <typename Function>
void Dispatch(int e5m2, Function function) {
  if (e5m2) {
    function(std::integral_constant<Element, Element::kE5M2>{});
  } else {
    function(std::integral_constant<Element, Element::kE4M3>{});
  }
}

}  // namespace

extern "C" void scales(const float* largest, long count, int e5m2, int power_of_two, float* out) {
  Dispatch(e5m2, [&](auto element) {
    for (long i = 0; i < count; ++i) out[i] = MakeScale<element.value>(largest[i], power_of_two);
  });
}

// Codes of four elements with the same scale.
extern "C" void codes(const float* x, const float* scales, long fours, int e5m2, uint32_t* out) {
  Dispatch(e5m2, [&](auto element) {
    for (long i = 0; i < fours; ++i) {
      const float lift = IsSmall(scales[i]) ? kLift : 1.0f;
      float four[4];
      for (int j = 0; j < 4; ++j) four[j] = x[4 * i + j] * lift;
      out[i] =
          Encode4<element.value, false>(four, MakeDivisor(scales[i]), IsDead(scales[i]), nullptr);
    }
  });
}

// The same of elements of 16 bits.
extern "C" void split_codes(const float* x, const float* scales, long fours, int e5m2,
                            uint32_t* out) {
  Dispatch(e5m2, [&](auto element) {
    for (long i = 0; i < fours; ++i) {
      const float four[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      out[i] = EncodeSplit4<element.value>(four, MakeSplitReciprocal(scales[i]));
    }
  });
}

// The code of q for each of the 2^16 random numbers.
extern "C" void stochastic_codes(float q, int e5m2, uint8_t* codes) {
  Dispatch(e5m2, [&](auto element) {
    for (uint32_t i = 0; i < 1u << 16; ++i) {
      const int which = i % 2;
      codes[i] = StochasticCode<element.value>(q, which ? i << 16 : i, which);
    }
  });
}

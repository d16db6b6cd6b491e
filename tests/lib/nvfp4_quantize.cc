// ffi/nvfp4/device/quantize_block.cuh on the host, for test_nvfp4_quantize_host.py.
#include <algorithm>

#include "nvfp4/device/quantize_block.cuh"

using namespace jgg;
using namespace jgg::nvfp4::device;

namespace {

struct Arrays {
  const void* x;
  long blocks;
  const uint32_t* seed;  // or null
  bool hadamard;
  uint32_t* weight;
  uint8_t* scales;
  float* global_scale;
};

template <DType kOf>
void Quantize(const Arrays& arrays) {
  const auto* x = static_cast<const Elements<kOf, kBlock>*>(arrays.x);
  const auto block = [&](long i) {
    Values values = Widen(x[i]);
    if (arrays.hadamard) Rotate(&values);
    return values;
  };
  uint32_t amax = 0;
  for (long i = 0; i < arrays.blocks; ++i) {
    if (arrays.hadamard) {
      RaiseToRotated(Widen(x[i]), &amax);
    } else {
      amax = std::max(amax, LargestFinite(x[i]));
    }
  }
  *arrays.global_scale = GlobalScale(amax);
  const MatrixScales matrix = MakeMatrixScales(amax);
  for (long i = 0; i < arrays.blocks; ++i) {
    const Values values = block(i);
    const BlockScale scale = MakeBlockScale(LargestMagnitude(values), matrix);
    arrays.scales[i] = scale.byte;
    if (arrays.seed != nullptr) {
      const RandomBits random(i, arrays.seed[0], arrays.seed[1]);
      EncodeStochastic(values, scale, random, arrays.weight + 2 * i);
    } else {
      EncodeNearest(values, scale, arrays.weight + 2 * i);
    }
  }
}

}  // namespace

extern "C" void quantize(int dtype, const void* x, long blocks, const uint32_t* seed, int hadamard,
                         uint32_t* weight, uint8_t* scales, float* global_scale) {
  const Arrays arrays{x, blocks, seed, hadamard != 0, weight, scales, global_scale};
  switch (static_cast<DType>(dtype)) {
    case DType::kF32: return Quantize<DType::kF32>(arrays);
    case DType::kBF16: return Quantize<DType::kBF16>(arrays);
    case DType::kF16: return Quantize<DType::kF16>(arrays);
  }
}

extern "C" void random_bits(uint64_t block, uint32_t key0, uint32_t key1, uint32_t* words) {
  const RandomBits random(block, key0, key1);
  for (int i = 0; i < 8; ++i) words[i] = random.words[i];
}

// The code of y for each of the 2^16 random numbers.
extern "C" void stochastic_codes(float y, uint8_t* codes) {
  for (uint32_t i = 0; i < 1u << 16; ++i) {
    codes[i] = StochasticCode(y, AsFloat(0x43000000 | i)) >> 16;
  }
}

// The largest magnitude of each of `count` rotated blocks of float32, as amax finds it where
// `least` was found before; 0 where that is not exceeded.
extern "C" void raised(const Values* x, long count, const uint32_t* least, uint32_t* largest) {
  for (long i = 0; i < count; ++i) {
    uint32_t bits = least[i];
    RaiseToRotated(x[i], &bits);
    largest[i] = bits == least[i] ? 0 : bits;
  }
}

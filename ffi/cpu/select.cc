// Which of the compiled kernels this processor runs, and what all of them share.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/encode.h"
#include "cpu/gemm.h"
#include "cpu/lines.h"

namespace jgg::cpu {

namespace {
std::atomic<int> most_level{4};
}

void AtMostLevel(int level) { most_level = level; }

#ifdef JGG_X86_LEVELS
// x86-64-v4, v3, or neither.
static int Level() {
  static const int level = [] {
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd");
    return v4 ? 4 : v3 ? 3 : 0;
  }();
  return std::min(level, most_level.load(std::memory_order_relaxed));
}
#define JGG_BEST(name) (Level() == 4 ? name##V4 : Level() == 3 ? name##V3 : name##Baseline)
#else
#define JGG_BEST(name) name##Baseline
#endif

Gemm BestGemm() { return JGG_BEST(Gemm); }

Encode BestEncode() { return JGG_BEST(Encode); }

const LineKernels& BestLines() { return JGG_BEST(kLines); }

namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint16_t ToBf16(float value) {
  const uint32_t bits = Bits(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

uint16_t ToF16(float value) {
  const uint32_t bits = Bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;  // 2^16 and above: infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: a float16 subnormal, counted in units of 2^-24, which is 0.5f's last place.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    half = Bits(shifted + 0.5f) - Bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace

void Round(const float* in, int64_t count, DType dtype, uint16_t* out) {
  if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) out[i] = ToBf16(in[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = ToF16(in[i]);
  }
}

}  // namespace jgg::cpu

// What grouped_mm's kernels need of CUTLASS to be compiled for the host. Only bfloat16 has values.
#pragma once

#include <cstdint>
#include <cstring>

namespace cutlass {

struct bfloat16_t {
  uint16_t bits = 0;

  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t all;
    std::memcpy(&all, &value, 4);
    const bool nan = (all & 0x7fffffff) > 0x7f800000;
    bits = static_cast<uint16_t>(nan ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t all = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
  uint16_t raw() const { return bits; }
};

struct half_t : bfloat16_t {
  using bfloat16_t::bfloat16_t;
};
struct tfloat32_t {};

}  // namespace cutlass

// What grouped_mm/device/activation.cuh needs of CUTLASS to be compiled for the host.
#pragma once

namespace cutlass {

struct bfloat16_t {
  bfloat16_t() = default;
  explicit bfloat16_t(float) {}
  explicit operator float() const { return 0.0f; }
};

struct half_t : bfloat16_t {
  using bfloat16_t::bfloat16_t;
};

}  // namespace cutlass

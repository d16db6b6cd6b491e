// Results of what quantizes: codes and their scales.
#pragma once

#include <cstdint>

namespace jgg {

// Codes and scales of blocks of 128, along columns or along rows.
struct Fp8Codes {
  void* codes;
  float* scales;
  const uint32_t* seed;  // two words, or null: round to nearest
};

}  // namespace jgg

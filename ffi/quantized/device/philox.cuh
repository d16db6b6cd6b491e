// Philox4x32-7, as jax_groupgemm's _quantized/philox.py has it.
#pragma once

#include "quantized/device/instructions.cuh"

namespace jgg::device {

inline constexpr int kPhiloxRounds = 7;

// One round of a counter of four words.
JGG_HOST_DEVICE void PhiloxRound(uint32_t* c, uint32_t key0, uint32_t key1) {
  const uint64_t first = uint64_t{c[0]} * 0xd2511f53u, second = uint64_t{c[2]} * 0xcd9e8d57u;
  c[0] = static_cast<uint32_t>(second >> 32) ^ c[1] ^ key0;
  c[1] = static_cast<uint32_t>(second);
  c[2] = static_cast<uint32_t>(first >> 32) ^ c[3] ^ key1;
  c[3] = static_cast<uint32_t>(first);
}

JGG_HOST_DEVICE void NextPhiloxKey(uint32_t* key0, uint32_t* key1) {
  *key0 += 0x9e3779b9u;
  *key1 += 0xbb67ae85u;
}

}  // namespace jgg::device

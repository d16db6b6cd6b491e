// Groups of numbers on one thread, to codes and scales. Compiled once per instruction set, as
// gemm.h.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "quantized/formats.h"

namespace jgg::cpu {

// `count` groups of `size` numbers, one after another in every array. There is one global scale.
struct Groups {
  Mode mode;
  int bits;
  int64_t size, count;
  const void* w;
  DType dtype;  // of w, and of scales and biases that are floats
  uint8_t *codes, *scales, *biases;
  float inverse;  // 1 / global scale, at most the largest float32; 1 where there is none
};

// Encodes groups as jax_groupgemm.quantize defines them. odd[i]: not group i, which has numbers
// that float32 arithmetic may not encode so; what was written of it does not count. Subnormal
// numbers must not count as zeros on this thread.
using Encode = void (*)(const Groups& groups, bool* odd);

void EncodeBaseline(const Groups& groups, bool* odd);
#ifdef JGG_X86_LEVELS
void EncodeV3(const Groups& groups, bool* odd);
void EncodeV4(const Groups& groups, bool* odd);
#endif

// The best of these on this processor.
Encode BestEncode();

}  // namespace jgg::cpu

// How wide copies may be.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/dtype.h"

namespace jgg {

// The most elements, a power of two of at most 16 bytes, in which an operand may be copied whose
// base and whose every distance allow it.
inline int AlignedElements(DType dtype, const void* base,
                           std::initializer_list<int64_t> distances) {
  const int size = Size(dtype);
  int width = 16 / size;
  while (reinterpret_cast<uintptr_t>(base) % (width * size) != 0) width /= 2;
  for (int64_t distance : distances) {
    while (distance % width != 0) width /= 2;
  }
  return width;
}

// All 16 bytes, or one element.
inline int WholeAlignedElements(DType dtype, const void* base,
                                std::initializer_list<int64_t> distances) {
  const int width = AlignedElements(dtype, base, distances);
  return width * Size(dtype) == 16 ? width : 1;
}

}  // namespace jgg

// The element types that handlers know.
#pragma once

namespace jgg {

enum class DType { kF32, kBF16, kF16 };

// Bytes of an element.
constexpr int Size(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 4;
    case DType::kBF16: return 2;
    case DType::kF16: return 2;
  }
  return 0;
}

}  // namespace jgg

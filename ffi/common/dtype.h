// The element types that handlers know.
#pragma once

namespace jgg {

enum class DType { kF32, kBF16, kF16 };

}  // namespace jgg

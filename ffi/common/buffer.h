// XLA buffers as handlers see them.
#pragma once

#include <optional>

#include "common/dtype.h"
#include "common/error.h"

namespace jgg {

inline std::optional<DType> ToDType(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32: return DType::kF32;
    case xla::ffi::BF16: return DType::kBF16;
    case xla::ffi::F16: return DType::kF16;
    default: return std::nullopt;
  }
}

inline xla::ffi::Error CheckFloat(const char* op, const char* name, xla::ffi::DataType type) {
  if (ToDType(type)) return xla::ffi::Error::Success();
  return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(type),
                         ", expected float32, bfloat16 or float16");
}

}  // namespace jgg

// XLA buffers as handlers see them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

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

// An operand that a call may leave out: then it is empty.
template <typename T>
const T* DataOrNull(const xla::ffi::AnyBuffer& a) {
  return a.element_count() == 0 ? nullptr : static_cast<const T*>(a.untyped_data());
}

// A buffer (..., planes, inner), seen as (..., inner); any other as it is.
class PlanesBuffer {
 public:
  PlanesBuffer(const xla::ffi::AnyBuffer& buffer, int planes = 1)  // NOLINT: implicit
      : buffer_(buffer) {
    dimensions_.assign(buffer.dimensions().begin(), buffer.dimensions().end());
    if (planes == 1) return;
    // Shapes that do not fit stay as they are, for CheckShape to report.
    const size_t rank = dimensions_.size();
    if (rank >= 2 && dimensions_[rank - 2] == planes) dimensions_.erase(dimensions_.end() - 2);
  }

  xla::ffi::DataType element_type() const { return buffer_.element_type(); }
  void* untyped_data() const { return buffer_.untyped_data(); }
  const std::vector<int64_t>& dimensions() const { return dimensions_; }

 private:
  xla::ffi::AnyBuffer buffer_;
  std::vector<int64_t> dimensions_;
};

inline xla::ffi::Error CheckPlanes(const char* op, int planes, xla::ffi::DataType type) {
  if (planes == 1 || ((planes == 2 || planes == 3) && type == xla::ffi::BF16)) {
    return xla::ffi::Error::Success();
  }
  return InvalidArgument(op, "planes=", planes, " is not 1, or 2 or 3 of bfloat16");
}

inline xla::ffi::Error CheckFloat(const char* op, const char* name, xla::ffi::DataType type) {
  if (ToDType(type)) return xla::ffi::Error::Success();
  return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(type),
                         ", expected float32, bfloat16 or float16");
}

}  // namespace jgg

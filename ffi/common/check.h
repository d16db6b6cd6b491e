// Shape checks of handler arguments. Python has checked the user's arguments before; these keep
// a handler from reading out of bounds whoever calls it. Tables on the host are checked in
// grouped_mm/metadata_bind.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/error.h"

namespace jgg {

template <typename Buffer>
std::string ShapeText(const Buffer& buffer) {
  std::string text = "(";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i ? ", " : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + ")";
}

// `expected` holds a size per axis, or -1 where any will do.
template <typename Buffer>
xla::ffi::Error CheckShape(const char* op, const char* name, const char* letters,
                           const Buffer& buffer, std::initializer_list<int64_t> expected) {
  const auto shape = buffer.dimensions();
  bool ok = shape.size() == expected.size();
  size_t i = 0;
  for (int64_t size : expected) {
    ok = ok && (size == -1 || shape[i] == size);
    ++i;
  }
  if (ok) return xla::ffi::Error::Success();
  std::string sizes;
  for (int64_t size : expected) {
    sizes += (sizes.empty() ? "" : ", ") + (size == -1 ? "any" : std::to_string(size));
  }
  return InvalidArgument(op, name, " has shape ", ShapeText(buffer), ", expected ", letters, " = (",
                         sizes, ")");
}

inline xla::ffi::Error CheckDtype(const char* op, const char* name, const xla::ffi::AnyBuffer& a,
                                  xla::ffi::DataType dtype, const char* expected) {
  if (a.element_type() == dtype) return xla::ffi::Error::Success();
  return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(a.element_type()),
                         ", expected ", expected);
}

// Axes that a kernel counts in int32, with room for a tile.
inline xla::ffi::Error CheckSmall(const char* op, std::initializer_list<int64_t> sizes,
                                  int64_t least = 1) {
  for (int64_t size : sizes) {
    if (size < least || size > INT32_MAX - 1024) {
      return InvalidArgument(op, "an axis has length ", size, ", expected ", least,
                             " to 2^31 - 1025");
    }
  }
  return xla::ffi::Error::Success();
}

// One number per group.
inline xla::ffi::Error CheckPerGroup(const char* op, const char* name, const xla::ffi::AnyBuffer& a,
                                     int64_t groups, xla::ffi::DataType dtype,
                                     const char* dtype_name) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, a, dtype, dtype_name));
  return CheckShape(op, name, "(G,)", a, {groups});
}

// Kernels copy 16 bytes at a time.
inline xla::ffi::Error CheckAligned(const char* op, std::initializer_list<const void*> buffers) {
  for (const void* data : buffers) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return Unimplemented(op, "a buffer is not aligned to 16 bytes");
    }
  }
  return xla::ffi::Error::Success();
}

}  // namespace jgg

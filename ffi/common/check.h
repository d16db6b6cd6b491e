// Shape checks of handler arguments. Python has checked the user's arguments before; these keep
// a handler from reading out of bounds whoever calls it.
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

}  // namespace jgg

// What the handlers of low rank check alike.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/buffer.h"
#include "common/check.h"

namespace jgg {

// An operand, or a result, of x's dtype, at a multiple of 16 bytes.
inline xla::ffi::Error CheckLoraLines(const char* op, const char* name, const char* letters,
                                      const xla::ffi::AnyBuffer& lines, xla::ffi::DataType dtype,
                                      std::initializer_list<int64_t> shape) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, lines, dtype, "that of x"));
  JGG_RETURN_IF_ERROR(CheckShape(op, name, letters, lines, shape));
  return CheckAligned(op, {lines.untyped_data()});
}

}  // namespace jgg

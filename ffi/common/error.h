// Errors: one self-contained line each, "jgg.<op>: what, expected, got, remedy".
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jgg {

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
xla::ffi::Error InvalidArgument(const char* op, const Parts&... parts) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, StrCat("jgg.", op, ": ", parts...));
}

template <typename... Parts>
xla::ffi::Error Unimplemented(const char* op, const Parts&... parts) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented, StrCat("jgg.", op, ": ", parts...));
}

}  // namespace jgg

#define JGG_RETURN_IF_ERROR(expression)        \
  do {                                         \
    xla::ffi::Error jgg_error = (expression);  \
    if (jgg_error.failure()) return jgg_error; \
  } while (false)

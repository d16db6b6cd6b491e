// Errors: one self-contained line each, "jgg.<op>: what, expected, got, remedy".
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jgg {

// Text and integers, one after another. It needs no stream: where libstdc++ is linked into this
// module and another one is in the process, they share the numbers of locales' facets, and a stream
// of one calls what the other put there.
inline void AppendTo(std::string* text, std::string_view part) { text->append(part); }
template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, bool> = true>
void AppendTo(std::string* text, Integer part) {
  text->append(std::to_string(part));
}

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string text;
  (AppendTo(&text, parts), ...);
  return text;
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

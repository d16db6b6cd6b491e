// The parts of rules about static shapes. A rule says in one sentence why a kernel cannot take
// a call. It is host code that needs neither CUDA nor XLA: handlers ask it, and Python does through
// _ffi, in every build.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace jgg::rules {

// Why not; nothing where the kernel can.
using Reason = std::optional<std::string>;

// The enumerator of this name; `names` are in the order of Enum, from 0 on.
template <typename Enum, size_t kCount>
std::optional<Enum> FindName(const std::string_view (&names)[kCount], std::string_view name) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

// Rows that a segment has on average, rounded up.
constexpr int64_t RowsPerSegment(int64_t rows, int64_t segments) {
  return (rows + segments - 1) / (segments > 0 ? segments : 1);
}

// Why an axis of `got` elements is not whole multiples of `unit`.
inline Reason NeedsMultiple(const char* name, int64_t unit, int64_t got) {
  if (got % unit == 0) return std::nullopt;
  return std::string("needs ") + name + " % " + std::to_string(unit) + " == 0, got " + name + "=" +
         std::to_string(got);
}

// TMA copies lines of whole 16 bytes.
inline Reason NeedsWholeLines(const char* name, int element_bytes, int64_t got) {
  return NeedsMultiple(name, 16 / element_bytes, got);
}

}  // namespace jgg::rules

// The modes of quantized arrays, and why the Hopper kernel cannot take a product with one as it is
// stored: see common/rules.h.
#pragma once

#include <string_view>

#include "common/rules.h"
#include "quantized/quantized.h"

namespace jgg::rules {

// The facts of a mode that has this name.
inline const FormatFacts* FindMode(std::string_view name) {
  for (const FormatFacts& format : kFormats) {
    if (format.name == name) return &format;
  }
  return nullptr;
}

// Names of modes for which `has(facts)`, in the order of the list.
template <typename Has>
std::string NamesOf(const char* separator, Has has) {
  std::string names;
  std::string_view last;
  for (const FormatFacts& format : kFormats) {
    if (format.name == last || !has(format)) continue;
    if (!last.empty()) names += separator;
    names += last = format.name;
  }
  return names;
}

inline std::string UnknownMode(std::string_view name) {
  return "mode '" + std::string(name) + "' is not one of " +
         NamesOf(", ", [](const FormatFacts&) { return true; });
}

// A weight of this mode in groups of `group_size`, in any layout.
inline Reason GroupsSm90Problem(const FormatFacts& format, int group_size) {
  if (format.scale == ScaleType::kFloat32 || group_size >= format.least_group_sm90) {
    return std::nullopt;
  }
  return "has no groups of " + std::to_string(group_size) + " codes in mode '" +
         std::string(format.name) + "'";
}

// A qmm: x (T, K) @ W (K, N), a weight in layout "linear".
struct QmmShape {
  int64_t line;  // codes of a line of w: K, or N where w is quantized along N
  int bits;      // of a code
  bool bfloat16_x = true;
  bool bfloat16_scales = true;  // or scales are bytes
  bool half = false;            // not so: x, and scales and biases of 16 bits, are float16
  bool scaled = false;          // scales multiply sums, of any dtype
  bool transpose_w = true;      // w is quantized along K
  bool has_options = false;     // more than a product
  bool in_order = true;         // the segments' rows in the result are ascending and disjoint
};

inline Reason QmmSm90Problem(const QmmShape& qmm) {
  if (!qmm.half && !qmm.bfloat16_x) return "x is not bfloat16, or float16 beside float16 scales";
  if (!qmm.in_order) return "segments may overlap or come in any order";
  if (!qmm.transpose_w && qmm.has_options) return "w is quantized along N, which has no options";
  if (!qmm.half && !qmm.bfloat16_scales && !qmm.scaled) return "scales are not bfloat16";
  if (qmm.scaled && qmm.has_options) return "scales multiply sums, which has no options";
  // Lines of codes are whole 16 bytes.
  return NeedsMultiple(qmm.transpose_w ? "K * bits" : "N * bits", 128, qmm.line * qmm.bits);
}

// A product with a weight in layout "sm90", N of both halves where the activation is gated.
inline Reason QmmPackedProblem(int64_t n, bool gated) {
  if (!gated || (n % 2 == 0 && n / 2 % 64 == 0)) return std::nullopt;
  return "needs N / 2 % 64 == 0 with a gated activation, got N=" + std::to_string(n);
}

// The name, as the way of a plan (plan.h), of the generic kernel of weights in layout "sm90".
constexpr std::string_view kGenericWay = "generic";

// Whether that kernel decodes a format.
constexpr bool IsPackedSm80(const FormatFacts& format) {
  return format.is_prepacked && format.bits == 4;
}

// ... and takes a product with such a weight.
inline Reason QmmPackedSm80Problem(const FormatFacts& format, int group_size, int64_t n,
                                   bool gated) {
  if (!IsPackedSm80(format)) {
    return "reads prepacked codes of 4 bits, got bits=" + std::to_string(format.bits);
  }
  if (auto reason = GroupsSm90Problem(format, group_size)) return reason;
  return QmmPackedProblem(n, gated);
}

}  // namespace jgg::rules

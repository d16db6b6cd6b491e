// A quantized weight as lines for the CPU kernels.
#pragma once

#include "cpu/lines.h"
#include "quantized/quantized.h"

namespace jgg {

inline cpu::Lines LinesOf(const QuantizedWeight& w, DType rounds) {
  const bool in_blocks = w.coding.Facts().scale == ScaleType::kFloat32;
  cpu::Lines lines{};
  lines.mode = w.coding.mode;
  lines.bits = w.coding.bits;
  lines.scale_dtype = w.coding.scale_dtype;
  lines.rounds = rounds;
  lines.elements = w.elements;
  lines.line_bytes = w.elements * w.coding.bits / 8;
  lines.group = w.group_size;
  const auto codes_of = [&] { return int64_t{1} << lines.group_bits; };
  while (codes_of() < w.group_size) ++lines.group_bits;
  if (codes_of() != w.group_size) lines.group_bits = -1;
  lines.lines = w.lines;
  lines.lines_each = in_blocks ? w.lines_each : 1;
  lines.blocks = (w.lines + lines.lines_each - 1) / lines.lines_each;
  lines.line_scales = (w.elements + w.group_size - 1) / w.group_size;
  lines.codes = static_cast<const uint8_t*>(w.packed);
  lines.codes_end = lines.codes + w.groups * w.lines * lines.line_bytes;
  lines.scales = static_cast<const uint8_t*>(w.scales);
  lines.scales_end = lines.scales + w.groups * lines.blocks * lines.line_scales *
                                        (in_blocks ? 4 : w.coding.ScaleBytes());
  lines.biases = static_cast<const uint8_t*>(w.biases);
  lines.factors = w.global_scale.data;
  lines.factor_stride = w.global_scale.group;
  return lines;
}

}  // namespace jgg

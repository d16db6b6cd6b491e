// From XLA's buffers to PackedCodesSm90.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "quantized/quantized.h"
#include "quantized/rules.h"

namespace jgg {

// A weight in layout "sm90", (G, N, K), of this coding: tiles of 64 columns x 64 k. `scaled`:
// scales multiply sums, so that they may be float32, and of 16 codes.
inline xla::ffi::Error BindPacked(const char* op, const xla::ffi::AnyBuffer& weight,
                                  const xla::ffi::AnyBuffer& scales, const QuantizedWeight& w,
                                  PackedCodesSm90* packed, bool scaled = false) {
  packed->half_scales = scales.element_type() == xla::ffi::U16;
  if (weight.element_type() != xla::ffi::U32 ||
      (scales.element_type() != xla::ffi::U32 && !packed->half_scales)) {
    return InvalidArgument(op, "weight must be uint32, and scales uint32 or uint16");
  }
  if (packed->half_scales && !w.coding.HasFloatScales()) {
    return InvalidArgument(op, "scales of mode '", w.coding.Facts().name, "' must be uint32");
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(G, N/64, K/64, 128 * bits)", weight,
                                 {-1, -1, -1, 128 * w.coding.bits}));
  const auto shape = weight.dimensions();
  const auto reason = rules::GroupsSm90Problem(w.coding.Facts(), w.group_size);
  if (reason && !scaled) return Unimplemented(op, *reason);
  const PackedScales tile = w.coding.Facts().packed_scales_of(w.group_size);
  packed->float_scales = w.coding.HasFloatScales() && !packed->half_scales &&
                         scales.dimensions().size() == 4 &&
                         scales.dimensions()[3] == 2 * tile.words;
  if (packed->float_scales && !scaled) return Unimplemented(op, "scales are float32");
  const int each = packed->half_scales || packed->float_scales ? 2 : 1;
  JGG_RETURN_IF_ERROR(CheckShape(op, "scales", "(G, N/64, K/64 or 128, words)", scales,
                                 {shape[0], shape[1], 64 * shape[2] / tile.k, each * tile.words}));
  if (64 * shape[2] % tile.k != 0) {
    return InvalidArgument(op, "weight has shape ", ShapeText(weight), ", expected K % ", tile.k,
                           " == 0");
  }
  JGG_RETURN_IF_ERROR(CheckSmall(op, {shape[0], 64 * shape[1], 64 * shape[2]}));
  for (const auto& buffer : {weight, scales}) {
    if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
      return Unimplemented(op, "weight and scales must be 16-byte aligned");
    }
  }
  packed->tile_scales = (packed->float_scales ? 8 : 4) * tile.words * 64 / tile.k;
  packed->tiles_share = tile.k == 128;
  packed->tile_groups = w.group_size > 0 && w.group_size < 64 ? 64 / w.group_size : 1;
  packed->codes = weight.untyped_data();
  packed->column_tiles = static_cast<int>(shape[1]);
  packed->k_tiles = static_cast<int>(shape[2]);
  return xla::ffi::Error::Success();
}

}  // namespace jgg

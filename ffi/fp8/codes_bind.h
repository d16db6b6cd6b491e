// Buffers of codes, of their scales, and of the seeds that they are rounded with.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "fp8/codes.h"

namespace jgg {

// Two words, or none: round to nearest.
inline xla::ffi::Error BindSeed(const char* op, const xla::ffi::AnyBuffer& seed, Fp8Codes* to) {
  namespace ffi = xla::ffi;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "seeds", seed, ffi::U32, "uint32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "seeds", "(2,) or (0,)", seed, {-1}));
  const int64_t words = seed.dimensions()[0];
  if (words != 0 && words != 2) {
    return InvalidArgument(op, "a seed has ", words, " words, expected 2 or 0");
  }
  to->seed = words == 0 ? nullptr : static_cast<const uint32_t*>(seed.untyped_data());
  return ffi::Error::Success();
}

// A seed each way, or none at all.
inline xla::ffi::Error BindSeeds(const char* op, const xla::ffi::AnyBuffer& row_seed,
                                 const xla::ffi::AnyBuffer& column_seed, Fp8Codes* by_rows,
                                 Fp8Codes* by_columns) {
  JGG_RETURN_IF_ERROR(BindSeed(op, row_seed, by_rows));
  JGG_RETURN_IF_ERROR(BindSeed(op, column_seed, by_columns));
  if ((by_rows->seed == nullptr) != (by_columns->seed == nullptr)) {
    return InvalidArgument(op, "needs both seeds or none");
  }
  return xla::ffi::Error::Success();
}

// Codes (lines, along) and their scales.
inline xla::ffi::Error BindFp8Codes(const char* op, const char* name,
                                    const xla::ffi::AnyBuffer& codes,
                                    const xla::ffi::AnyBuffer& scales, int64_t lines, int64_t along,
                                    Fp8Codes* to) {
  namespace ffi = xla::ffi;
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, codes, ffi::F8E4M3FN, "float8_e4m3fn"));
  JGG_RETURN_IF_ERROR(CheckShape(op, name, "(lines, elements)", codes, {lines, along}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, name, "(lines, blocks of 128)", scales, {lines, (along + 127) / 128}));
  to->codes = codes.untyped_data();
  to->scales = static_cast<float*>(scales.untyped_data());
  if (reinterpret_cast<uintptr_t>(to->codes) % 16 != 0) {
    return Unimplemented(op, "a buffer is not aligned to 16 bytes");
  }
  return ffi::Error::Success();
}

}  // namespace jgg

// What the handlers of FP8's gated activations have in common.
#pragma once

#include <string_view>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/activation_sm80.h"
#include "fp8/rules.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// h (R, 2F), sizes (G,), and a workspace, which has room for tiles of padded rows where blocks lie
// along rows.
inline xla::ffi::Error BindActivation(const char* op, std::string_view activation,
                                      const xla::ffi::AnyBuffer& h,
                                      const xla::ffi::AnyBuffer& sizes,
                                      const xla::ffi::AnyBuffer& workspace, bool along_rows,
                                      Fp8ActivationSm80* args) {
  namespace ffi = xla::ffi;
  const auto known = ToActivation(activation);
  if (!known || !IsGated(*known)) {
    return InvalidArgument(op, "activation '", activation, "' is not gated");
  }
  JGG_RETURN_IF_ERROR(CheckDtype(op, "h", h, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "h", "(R, 2F)", h, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sizes", sizes, ffi::S32, "int32"));
  args->activation = *known;
  args->rows = h.dimensions()[0];
  args->columns = h.dimensions()[1] / 2;
  args->groups = sizes.dimensions()[0];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {args->rows, 2 * args->columns, args->groups}));
  if (h.dimensions()[1] % 2 != 0) {
    return InvalidArgument(op, "h must have an even number of columns, got ", ShapeText(h));
  }
  if (auto reason = rules::Fp8ActivationProblem(args->columns, along_rows)) {
    return Unimplemented(op, *reason);
  }
  const int64_t tiles = along_rows ? Fp8PaddedRows(args->rows, args->groups) / 128 : 0;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "workspace", workspace, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "workspace", "(words,)", workspace, {Fp8GroupsWords(args->groups, tiles)}));
  args->h = h.untyped_data();
  args->sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args->workspace = workspace.untyped_data();
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return ffi::Error::Success();
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

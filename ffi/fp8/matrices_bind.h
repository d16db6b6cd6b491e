// Buffers that the handlers of fp8_quantize and fp8_cast have alike.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// x (M, R, C).
template <typename Args>
xla::ffi::Error BindMatrices(const char* op, const xla::ffi::AnyBuffer& x, Args* args) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(M, R, C)", x, {-1, -1, -1}));
  args->x = x.untyped_data();
  args->matrices = x.dimensions()[0];
  args->rows = x.dimensions()[1];
  args->columns = x.dimensions()[2];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {args->matrices, args->rows, args->columns}));
  return CheckAligned(op, {args->x});
}

// Sizes of groups, and a list of rows; each may be empty.
template <typename Args>
xla::ffi::Error BindRows(const char* op, const xla::ffi::AnyBuffer& sizes,
                         const xla::ffi::AnyBuffer& list, Args* args) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sizes", sizes, xla::ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "list", "(R,)", list, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "list", list, xla::ffi::S32, "int32"));
  args->sizes = DataOrNull<int32_t>(sizes);
  args->list = DataOrNull<int32_t>(list);
  return xla::ffi::Error::Success();
}

// Result `at`. Its words depend on what `args` has already.
template <typename Args>
xla::ffi::Error BindWorkspace(const char* op, xla::ffi::RemainingRets results, size_t at,
                              Args* args) {
  auto workspace = results.get<xla::ffi::AnyBuffer>(at);
  if (!workspace) return workspace.error();
  args->workspace = (*workspace)->untyped_data();
  JGG_RETURN_IF_ERROR(CheckDtype(op, "workspace", **workspace, xla::ffi::S32, "int32"));
  return CheckShape(op, "workspace", "(words,)", **workspace, {args->workspace_words()});
}

}  // namespace jgg

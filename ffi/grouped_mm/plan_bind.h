// From a call's attributes to its plan.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/plan.h"

namespace jgg {

inline xla::ffi::Error BindPlan(const char* op, const PlanAttrs& attrs, rules::PlanSm90* plan) {
  const auto rows = rules::FindName<rules::RowsBy>(rules::kRowsBy, attrs.rows);
  if (!rows) return InvalidArgument(op, "unknown plan of rows '", attrs.rows, "'");
  *plan = {*rows, attrs.tile, attrs.pairs};
  return xla::ffi::Error::Success();
}

// The next result as the workspace of a kernel that needs one.
inline xla::ffi::Error BindWorkspace(const char* op, xla::ffi::RemainingRets results,
                                     void** workspace, int64_t* bytes) {
  if (results.size() != 1) return InvalidArgument(op, "has ", 1 + results.size(), " results");
  auto result = results.get<xla::ffi::AnyBuffer>(0);
  if (!result) return result.error();
  JGG_RETURN_IF_ERROR(CheckDtype(op, "workspace", **result, xla::ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "workspace", "(bytes,)", **result, {-1}));
  *workspace = (*result)->untyped_data();
  *bytes = (*result)->dimensions()[0];
  return xla::ffi::Error::Success();
}

}  // namespace jgg

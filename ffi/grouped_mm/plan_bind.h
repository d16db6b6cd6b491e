// From a call's attributes to its plan.
#pragma once

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

}  // namespace jgg

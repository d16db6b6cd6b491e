// Lists of rows among a handler's operands.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm.h"

namespace jgg {

// The next operand as the rows of an operand that the rows of the product are, so many.
inline xla::ffi::Error BindRows(const char* op, const char* name, Operands* operands, RowList* rows,
                                int64_t* count) {
  const auto list = operands->Take(name);
  if (!list) return list.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, name, "(T,)", *list, {-1}));
  if (list->element_type() != xla::ffi::S32) {
    return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(list->element_type()),
                           ", expected int32");
  }
  rows->list = static_cast<const int32_t*>(list->untyped_data());
  *count = list->dimensions()[0];
  return xla::ffi::Error::Success();
}

}  // namespace jgg

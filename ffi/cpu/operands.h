// Operands, as the CPU handlers share them.
#pragma once

#include "common/dtype.h"
#include "cpu/gemm.h"
#include "grouped_mm/mm.h"

namespace jgg::cpu {

// Rows of the result in one task: enough that packing its weights does not count.
constexpr int64_t kTaskRows = kBlockM;

// A view into a buffer; `offset`, `row` and `column` are in elements.
inline Matrix At(const void* data, int64_t offset, int64_t row, int64_t column, DType dtype) {
  char* bytes = const_cast<char*>(static_cast<const char*>(data));
  return Matrix{bytes + offset * Size(dtype), row, column, dtype};
}

// The list from its entry `first` on, or null for the lines as they are.
inline const int32_t* From(const RowList& rows, int64_t first) {
  return rows.list == nullptr ? nullptr : rows.list + first;
}

// Products number 0 to count, as at(index) makes them; it must outlive them.
template <typename At>
Products ProductsOf(int64_t count, const At& at) {
  const auto call = [](const void* context, int64_t index) {
    return (*static_cast<const At*>(context))(index);
  };
  return Products{count, call, &at};
}

}  // namespace jgg::cpu

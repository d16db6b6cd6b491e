// Random calls of the CPU handlers, for cpu_handlers.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "handlers.h"
#include "xla_stand_in.h"

namespace {

std::mt19937_64 random_bits;
int problems = 0;

int64_t Below(int64_t count) { return static_cast<int64_t>(random_bits() % count); }

void Problem(const std::string& what) {
  ++problems;
  std::fprintf(stderr, "%s\n", what.c_str());
}

XLA_FFI_DataType SomeDtype() {
  constexpr XLA_FFI_DataType kAll[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                       XLA_FFI_DataType_F16};
  return kAll[Below(3)];
}

// Often small, sometimes next to a whole block, or several.
int64_t SomeSize() {
  switch (Below(8)) {
    case 0: return 0;
    case 1: return 1;
    case 2: return 94 + Below(5);
    case 3: return 126 + Below(200);
    case 4: return 190 + Below(5);
    default: return 1 + Below(24);
  }
}

void Fill(Array& array) {
  for (int64_t i = 0; i < array.count; ++i) array.Set(i, (Below(2001) - 1000) / 512.0f);
}

struct Row {
  int32_t x_start, y_start, length, weight;
};

// Legal, in the order of rows of y or not; or with anything in some places.
std::vector<Row> SomeTable(int64_t rows_x, int64_t rows_y, int64_t groups, bool in_order,
                           bool forged) {
  std::vector<Row> table(Below(12));
  int64_t end = 0;
  for (Row& row : table) {
    const int64_t y_start =
        in_order ? end + Below(std::max<int64_t>(rows_y - end, 1)) : Below(rows_y + 1);
    const int64_t start = std::min(y_start, rows_y), x_start = Below(rows_x + 1);
    const int64_t most = std::min(rows_x - x_start, rows_y - start);
    const int64_t length = Below(3) == 0 ? most : Below(most + 1);
    row = {static_cast<int32_t>(x_start), static_cast<int32_t>(start), static_cast<int32_t>(length),
           static_cast<int32_t>(Below(groups + 2)) - 1};
    if (length > 0 && row.weight >= 0 && row.weight < groups) end = start + length;
    int32_t* const values = &row.x_start;
    constexpr int32_t kOdd[] = {INT32_MIN, INT32_MIN + 1, -1, 1, 1 << 30, INT32_MAX - 1, INT32_MAX};
    while (forged && Below(2) == 0) {
      values[Below(4)] = Below(2) == 0 ? kOdd[Below(7)] : static_cast<int32_t>(random_bits());
    }
  }
  return table;
}

bool Counts(const Row& row, int64_t groups) {
  return row.length > 0 && row.weight >= 0 && row.weight < groups;
}

bool IsLegal(const std::vector<Row>& table, int64_t rows_x, int64_t rows_y, int64_t groups) {
  return std::all_of(table.begin(), table.end(), [&](const Row& row) {
    if (!Counts(row, groups)) return true;
    return row.x_start >= 0 && row.y_start >= 0 && int64_t{row.x_start} + row.length <= rows_x &&
           int64_t{row.y_start} + row.length <= rows_y;
  });
}

struct Case {
  XLA_FFI_Handler* handler;
  std::vector<std::unique_ptr<Array>> operands;
  std::unique_ptr<Array> out;
  std::vector<Flags> flags;
  bool legal;
  std::vector<double> want, size;  // sums of products, and of their absolute values

  Result Run() {
    std::memset(out->data.get(), 0xff, out->count * out->Bytes());  // NaN
    std::vector<Array*> all;
    for (auto& operand : operands) all.push_back(operand.get());
    return Call(handler, all, {out.get()}, flags);
  }

  bool IsRight() const {
    const double unit = out->dtype == XLA_FFI_DataType_F32    ? 0x1p-24
                        : out->dtype == XLA_FFI_DataType_BF16 ? 0x1p-8
                                                              : 0x1p-11;
    for (int64_t i = 0; i < out->count; ++i) {
      const double allowed = 0x1p-16 * size[i] + unit * std::abs(want[i]) + 0x1p-25;
      if (!(std::abs(out->Get(i) - want[i]) <= allowed)) return false;
    }
    return true;
  }
};

std::unique_ptr<Array> TableOf(const std::vector<Row>& table) {
  auto array = std::make_unique<Array>(XLA_FFI_DataType_S32,
                                       std::vector<int64_t>{static_cast<int64_t>(table.size()), 4});
  if (!table.empty()) std::memcpy(array->data.get(), table.data(), table.size() * sizeof(Row));
  return array;
}

std::unique_ptr<Array> MatrixOf(XLA_FFI_DataType dtype, std::vector<int64_t> shape,
                                bool transpose) {
  if (transpose) std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
  return std::make_unique<Array>(dtype, std::move(shape));
}

// So many rows, each one of `lines` or none; an entry of a list that somebody forged.
std::unique_ptr<Array> SomeList(int64_t rows, int64_t lines) {
  auto array = std::make_unique<Array>(XLA_FFI_DataType_S32, std::vector<int64_t>{rows});
  auto* list = reinterpret_cast<int32_t*>(array->data.get());
  for (int64_t i = 0; i < rows; ++i) {
    list[i] = static_cast<int32_t>(Below(4) == 0 ? random_bits() : Below(lines + 2) - 1);
  }
  return array;
}

// Rows of an operand: as they are, or by list.
struct Rows {
  const Array* list;
  int64_t lines;  // of the operand

  // Row `row` of the product is this one, or -1: zeros.
  int64_t operator[](int64_t row) const {
    if (list == nullptr) return row;
    const int32_t line = reinterpret_cast<const int32_t*>(list->data.get())[row];
    return line < 0 || line >= lines ? -1 : line;
  }
};

int64_t Index(int64_t row, int64_t column, int64_t rows, int64_t columns, bool transpose) {
  return transpose ? column * rows + row : row * columns + column;
}

Case MmCase(bool forged) {
  const int64_t rows_x = SomeSize(), rows_y = SomeSize(), k = SomeSize(), n = SomeSize();
  const int64_t groups = Below(5);
  const bool tx = Below(2), tw = Below(2), to = Below(2), by_list = !tx && Below(2);
  const int64_t lines = by_list ? SomeSize() : rows_x;
  bool in_order = Below(2);
  const XLA_FFI_DataType dtype = SomeDtype();
  const auto table = SomeTable(rows_x, rows_y, groups, in_order, forged);
  if (Below(3) == 0) in_order = true;  // which may not be so
  Case c{jgg::JggMmCpu, {}, MatrixOf(SomeDtype(), {rows_y, n}, to), {}, true, {}, {}};
  c.operands.push_back(MatrixOf(dtype, {lines, k}, tx));
  c.operands.push_back(MatrixOf(dtype, {groups, k, n}, tw));
  const Array &x = *c.operands[0], &w = *c.operands[1];
  Fill(*c.operands[0]);
  Fill(*c.operands[1]);
  c.operands.push_back(TableOf(table));
  if (by_list) c.operands.push_back(SomeList(rows_x, lines));
  const Rows x_rows{by_list ? c.operands.back().get() : nullptr, lines};
  c.flags = {{"mm",
              {{"clears_rest", true},
               {"in_order", in_order},
               {"transpose_out", to},
               {"transpose_w", tw},
               {"transpose_x", tx}}},
             {"rows", {{"x_rows", by_list}, {"y_rows", false}}}};
  c.legal = IsLegal(table, rows_x, rows_y, groups);
  if (!c.legal) return c;
  c.want.assign(c.out->count, 0);
  c.size.assign(c.out->count, 0);
  for (const Row& row : table) {
    if (!Counts(row, groups)) continue;
    for (int64_t i = 0; i < row.length; ++i) {
      const int64_t line = x_rows[row.x_start + i];
      for (int64_t j = 0; line >= 0 && j < n; ++j) {
        const int64_t at = Index(row.y_start + i, j, rows_y, n, to);
        for (int64_t p = 0; p < k; ++p) {
          const double product = x.Get(Index(line, p, lines, k, tx)) *
                                 w.Get(row.weight * k * n + Index(p, j, k, n, tw));
          c.want[at] += product;
          c.size[at] += std::abs(product);
        }
      }
    }
  }
  return c;
}

Case WgradCase(bool forged) {
  const int64_t rows_x = SomeSize(), rows_y = SomeSize(), a = SomeSize(), b = SomeSize();
  const int64_t groups = Below(5);
  const bool tx = Below(2), ty = Below(2), x_list = !tx && Below(3) == 0;
  const bool y_list = !ty && Below(3) == 0;
  const int64_t lines_x = x_list ? SomeSize() : rows_x, lines_y = y_list ? SomeSize() : rows_y;
  const XLA_FFI_DataType dtype = SomeDtype();
  const auto table = SomeTable(rows_x, rows_y, groups, Below(2), forged);
  Case c{jgg::JggWgradCpu, {}, MatrixOf(SomeDtype(), {groups, a, b}, false), {}, true, {}, {}};
  c.operands.push_back(MatrixOf(dtype, {lines_x, a}, tx));
  c.operands.push_back(MatrixOf(dtype, {lines_y, b}, ty));
  const Array &x = *c.operands[0], &y = *c.operands[1];
  Fill(*c.operands[0]);
  Fill(*c.operands[1]);
  c.operands.push_back(TableOf(table));
  Rows x_rows{nullptr, lines_x}, y_rows{nullptr, lines_y};
  if (x_list) c.operands.push_back(SomeList(rows_x, lines_x));
  if (x_list) x_rows.list = c.operands.back().get();
  if (y_list) c.operands.push_back(SomeList(rows_y, lines_y));
  if (y_list) y_rows.list = c.operands.back().get();
  c.flags = {{"rows", {{"x_rows", x_list}, {"y_rows", y_list}}},
             {"wgrad", {{"transpose_x", tx}, {"transpose_y", ty}}}};
  c.legal = IsLegal(table, rows_x, rows_y, groups);
  if (!c.legal) return c;
  c.want.assign(c.out->count, 0);
  c.size.assign(c.out->count, 0);
  for (const Row& row : table) {
    if (!Counts(row, groups)) continue;
    for (int64_t i = 0; i < a; ++i) {
      for (int64_t j = 0; j < b; ++j) {
        const int64_t at = (row.weight * a + i) * b + j;
        for (int64_t p = 0; p < row.length; ++p) {
          const int64_t x_line = x_rows[row.x_start + p], y_line = y_rows[row.y_start + p];
          if (x_line < 0 || y_line < 0) continue;
          const double product =
              x.Get(Index(x_line, i, lines_x, a, tx)) * y.Get(Index(y_line, j, lines_y, b, ty));
          c.want[at] += product;
          c.size[at] += std::abs(product);
        }
      }
    }
  }
  return c;
}

}  // namespace

// The CPU handlers called as XLA calls them, without XLA: random calls, forged tables, allocations
// and bodies that fail. A program, for the sanitizers: test_cpu_handlers.py.
//
// cpu_handlers SEED CASES: says what is wrong, and returns how much.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "handlers.h"
#include "xla_stand_in.h"

namespace {

// ---- random calls ----------------------------------------------------------------------------

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
    return Call(handler, all, *out, flags);
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

// ---- quantized weights ----

// What a code is, or an E4M3 scale.
double E4M3(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -value : value;
}

double E2M1(uint32_t code) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

// A weight of some format, and how it reads.
struct SomeWeight {
  const jgg::FormatFacts& format;
  int64_t groups, lines, elements, group_size, lines_each;
  std::unique_ptr<Array> codes, scales, biases, factor;

  int64_t Blocks() const { return (lines + lines_each - 1) / lines_each; }
  int64_t LineScales() const { return (elements + group_size - 1) / group_size; }

  uint32_t Code(int64_t g, int64_t line, int64_t i) const {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(codes->data.get());
    uint32_t code = 0;
    const int64_t first = ((g * lines + line) * elements + i) * format.bits;
    for (int bit = 0; bit < format.bits; ++bit) {
      code |= (bytes[(first + bit) / 8] >> (first + bit) % 8 & 1u) << bit;
    }
    return code;
  }

  // As a product with x of a dtype has it.
  double At(int64_t g, int64_t line, int64_t i, XLA_FFI_DataType x_dtype) const {
    const uint32_t code = Code(g, line, i);
    const int64_t at = (g * Blocks() + line / lines_each) * LineScales() + i / group_size;
    const uint32_t byte = static_cast<uint8_t>(scales->data.get()[at]);
    if (format.scale == jgg::ScaleType::kFloat32) return E4M3(code) * scales->Get(at);
    if (format.scale == jgg::ScaleType::kE4M3) return E2M1(code) * E4M3(byte) * factor->Get(g);
    float value;
    if (format.scale == jgg::ScaleType::kE8M0) {
      const double number = format.bits == 4 ? E2M1(code) : E4M3(code);
      value = static_cast<float>(std::ldexp(number, static_cast<int>(byte) - 127));
    } else {
      const float product = static_cast<float>(code) * static_cast<float>(scales->Get(at));
      value = product + static_cast<float>(biases->Get(at));
    }
    Array rounded(x_dtype, {1});
    rounded.Set(0, value);
    return rounded.Get(0);
  }
};

SomeWeight SomeWeightOf(int64_t groups, int64_t lines) {
  const jgg::FormatFacts& format = jgg::kFormats[Below(jgg::kFormats.size())];
  const bool in_blocks = format.scale == jgg::ScaleType::kFloat32;
  int64_t size = in_blocks ? 16 << Below(4) : 16;
  while (!in_blocks && (!format.takes_group_size(size) || Below(3) == 0)) {
    size = size == 128 ? 16 : 2 * size;
  }
  const int64_t unit = format.bits % 2 == 0 ? size : std::max<int64_t>(size, 32);
  const int64_t elements = in_blocks ? 1 + Below(300) : unit * Below(600 / unit + 1);
  SomeWeight w{format, groups, lines, elements, size, in_blocks ? 1 + Below(5) : 1, {}, {}, {}, {}};
  const bool affine = format.scale == jgg::ScaleType::kScaleAndBias;
  const auto code_dtype = in_blocks ? XLA_FFI_DataType_F8E4M3FN : XLA_FFI_DataType_U32;
  const int64_t words = in_blocks ? elements : elements * format.bits / 32;
  w.codes = std::make_unique<Array>(code_dtype, std::vector<int64_t>{groups, lines, words});
  for (int64_t i = 0; i < w.codes->count * w.codes->Bytes(); ++i) {
    w.codes->data[i] = static_cast<char>(random_bits());
    if (format.bits == 8 && !affine) w.codes->data[i] &= ~2;  // no NaN
  }
  const auto scale_dtype = affine      ? SomeDtype()
                           : in_blocks ? XLA_FFI_DataType_F32
                                       : XLA_FFI_DataType_U8;
  const std::vector<int64_t> shape{groups, w.Blocks(), w.LineScales()};
  w.scales = std::make_unique<Array>(scale_dtype, shape);
  if (affine) w.biases = std::make_unique<Array>(scale_dtype, shape);
  for (int64_t i = 0; i < w.scales->count; ++i) {
    if (scale_dtype == XLA_FFI_DataType_U8) {
      w.scales->data[i] = static_cast<char>(format.scale == jgg::ScaleType::kE4M3 ? Below(0x50)
                                                                                  : 110 + Below(20));
    } else {
      w.scales->Set(i, (Below(2001) - 1000) / 65536.0f);
      if (affine) w.biases->Set(i, (Below(2001) - 1000) / 1024.0f);
    }
  }
  w.factor = std::make_unique<Array>(XLA_FFI_DataType_F32, std::vector<int64_t>{groups});
  for (int64_t g = 0; g < groups; ++g) w.factor->Set(g, Below(2) ? 1.0f : 0.375f);
  return w;
}

Case QmmCase(bool forged) {
  const int64_t rows_x = SomeSize(), rows_y = SomeSize(), groups = Below(5);
  const bool tw = Below(2);
  SomeWeight w = SomeWeightOf(groups, 1 + Below(40));
  const int64_t k = tw ? w.elements : w.lines, n = tw ? w.lines : w.elements;
  bool in_order = Below(3) > 0;
  const auto table = SomeTable(rows_x, rows_y, groups, in_order, forged);
  if (Below(3) == 0) in_order = true;  // which may not be so
  const bool in_blocks = w.format.scale == jgg::ScaleType::kFloat32;
  const bool affine = w.biases != nullptr, scaled = w.format.takes_global_scale;
  Case c{in_blocks ? jgg::JggQmmFp8Cpu : jgg::JggQmmCpu, {}, MatrixOf(SomeDtype(), {rows_y, n}, false),
         {}, true, {}, {}};
  const XLA_FFI_DataType dtype = SomeDtype();
  auto x = MatrixOf(dtype, {rows_x, k}, false);
  Fill(*x);
  c.legal = IsLegal(table, rows_x, rows_y, groups);
  c.want.assign(c.out->count, 0);
  c.size.assign(c.out->count, 0);
  for (const Row& row : table) {
    if (!c.legal || !Counts(row, groups)) continue;
    for (int64_t j = 0; j < n; ++j) {
      std::vector<double> column(k);
      for (int64_t p = 0; p < k; ++p) {
        column[p] = tw ? w.At(row.weight, j, p, dtype) : w.At(row.weight, p, j, dtype);
      }
      for (int64_t i = 0; i < row.length; ++i) {
        for (int64_t p = 0; p < k; ++p) {
          const double product = x->Get((row.x_start + i) * k + p) * column[p];
          c.want[(row.y_start + i) * n + j] += product;
          c.size[(row.y_start + i) * n + j] += std::abs(product);
        }
      }
    }
  }
  const Flags qmm{"qmm",
                  {{"in_order", in_order}, {"tf32", false}, {"transpose_w", tw}, {"x_ordered", false}}};
  if (in_blocks) {
    c.flags = {{"block",
                {{"columns", static_cast<int32_t>(w.group_size)},
                 {"rows", static_cast<int32_t>(w.lines_each)}}},
               qmm};
  } else {
    const std::string name(w.format.name);
    c.flags = {qmm,
               {"quantized",
                {{"biases", affine},
                 {"bits", w.format.bits},
                 {"global_scale", scaled},
                 {"group_size", static_cast<int32_t>(w.group_size)},
                 {"layout", "linear"},
                 {"mode", name.c_str()}}}};
  }
  c.operands.push_back(std::move(x));
  c.operands.push_back(std::move(w.codes));
  c.operands.push_back(std::move(w.scales));
  c.operands.push_back(TableOf(table));
  if (affine) c.operands.push_back(std::move(w.biases));
  if (scaled) c.operands.push_back(std::move(w.factor));
  return c;
}

void TryCase(int number) {
  const bool forged = number % 3 == 0;
  const int64_t kind = Below(3);
  Case c = kind == 0 ? MmCase(forged) : kind == 1 ? WgradCase(forged) : QmmCase(forged);
  const char* const names[] = {"mm", "wgrad", "qmm"};
  const std::string what = names[kind] + std::string(" case ") + std::to_string(number) + ": ";
  std::vector<char> before;
  for (const int threads : {0, 1, 4}) {  // the same bytes with any number
    Pool some(threads);
    pool = &some;
    const Result result = c.Run();
    if (!c.legal) {
      const bool says = result.message.find(" is rows [") != std::string::npos;
      if (result.ok || result.code != XLA_FFI_Error_Code_INVALID_ARGUMENT || !says) {
        Problem(what + "a forged table was taken: " + result.message);
      }
      continue;
    }
    if (!result.ok) Problem(what + result.message);
    if (result.ok && !c.IsRight()) Problem(what + "wrong values");
    const std::vector<char> bytes(c.out->data.get(),
                                  c.out->data.get() + c.out->count * c.out->Bytes());
    if (threads == 0) before = bytes;
    if (bytes != before) Problem(what + "threads make a difference");
  }
  // One allocation after the other fails, and all that follow it.
  for (int64_t fails = 0; number % 7 == 0 && fails < 1000; ++fails) {
    Pool some(3);
    pool = &some;
    allocations_failed = 0;
    allocations_left = fails;
    const Result result = c.Run();
    allocations_left = -1;
    if (result.ok && c.legal && !c.IsRight()) Problem(what + "wrong values without memory");
    if (!result.ok && result.code != XLA_FFI_Error_Code_RESOURCE_EXHAUSTED && c.legal) {
      Problem(what + "without memory: " + result.message);
    }
    if (allocations_failed == 0) break;
  }
}

// ---- a loop whose body fails -----------------------------------------------------------------

void TryThrowing(int threads, int64_t count, int64_t bad) {
  Pool some(threads);
  const std::string what =
      "ParallelFor of " + std::to_string(count) + ", " + std::to_string(threads) + " threads: ";
  std::atomic<int64_t> inside{0}, done{0};
  const auto caller = std::this_thread::get_id();
  std::string said;
  {
    // Memory of this scope: a body that is not waited for would use it later.
    const auto begun = std::make_unique<std::atomic<int64_t>>(0);
    try {
      jgg::cpu::ParallelFor(some, count, [&](int64_t i) {
        ++inside;
        ++*begun;
        if (std::this_thread::get_id() != caller)
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        --inside;
        if (i == bad) throw std::runtime_error("body " + std::to_string(i));
        ++done;
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    if (inside != 0) Problem(what + "a body still runs");
  }
  const std::string want = bad < 0 ? "" : "body " + std::to_string(bad);
  if (said != want) Problem(what + "'" + said + "' is not '" + want + "'");
  if (bad < 0 && done != count) Problem(what + "not all indices");
}

void TryFrame() {
  XLA_FFI_CallFrame frame{};
  frame.api = &api;
  const auto call = [&](auto handler) {
    return Take(jgg::CallInFrame("jgg_op", "jgg_op: out of memory", handler, &frame));
  };
  using Frame = XLA_FFI_CallFrame*;
  using Error = XLA_FFI_Error*;
  const Result good = call([](Frame) -> Error { return nullptr; });
  if (!good.ok) Problem("a handler that succeeds");
  const Result memory = call([](Frame) -> Error { throw std::bad_alloc(); });
  if (memory.code != XLA_FFI_Error_Code_RESOURCE_EXHAUSTED ||
      memory.message != "jgg_op: out of memory") {
    Problem("bad_alloc: " + memory.message);
  }
  const Result other = call([](Frame) -> Error { throw std::out_of_range("far"); });
  if (other.code != XLA_FFI_Error_Code_INTERNAL || other.message != "jgg_op: far") {
    Problem("an exception: " + other.message);
  }
  const Result number = call([](Frame) -> Error { throw 3; });
  if (number.code != XLA_FFI_Error_Code_INTERNAL) Problem("a number: " + number.message);
}

// ---- one GEMM --------------------------------------------------------------------------------

std::vector<jgg::cpu::Gemm> Gemms() {
  std::vector<jgg::cpu::Gemm> all = {jgg::cpu::GemmBaseline, jgg::cpu::BestGemm()};
#ifdef JGG_X86_LEVELS
  if (jgg::cpu::BestGemm() == jgg::cpu::GemmV4) all.push_back(jgg::cpu::GemmV3);
#endif
  return all;
}

// The sum of count products of `each` numbers of k: one is 2^30, all others
// are 1/4, of which a float32 sum of blocks loses whole blocks.
void TryLongSum(jgg::cpu::Gemm gemm, int64_t count, int64_t each, jgg::DType dtype) {
  const int bytes = jgg::Size(dtype);
  std::vector<char> a(count * each * bytes);
  for (int64_t i = 0; i < count * each; ++i) {
    const float value = i == 0 ? 0x1p15f : 0.5f;
    if (dtype == jgg::DType::kF32) {
      std::memcpy(a.data() + i * bytes, &value, bytes);
    } else {
      jgg::cpu::Round(&value, 1, dtype, reinterpret_cast<uint16_t*>(a.data()) + i);
    }
  }
  const auto at = [&](int64_t i) {
    // The second of two rows of C.
    const jgg::cpu::Matrix matrix{a.data() + i * each * bytes, each, 1, dtype};
    const jgg::cpu::Matrix column{a.data() + i * each * bytes, 1, each, dtype};
    return jgg::cpu::Product{1, 1, each, matrix, column};
  };
  using At = decltype(at);
  const auto call = [](const void* context, int64_t i) {
    return (*static_cast<const At*>(context))(i);
  };
  float out[2] = {-1, -1};
  gemm(2, 1, {count, call, &at}, {out, 1, 1, jgg::DType::kF32}, jgg::cpu::ThreadScratch());
  const double want = 0x1p30 + static_cast<double>(count * each - 1) / 4;
  if (out[0] != 0 || !(std::abs(out[1] - want) <= 0x1p-16 * want)) {
    Problem("a sum of " + std::to_string(count) + " times " + std::to_string(each) + ": " +
            std::to_string(out[1]) + " is not " + std::to_string(want));
  }
}

// How many bytes of scratch a product of 1 x 1 matrices writes, and one of none.
void TrySmall(jgg::cpu::Gemm gemm) {
  jgg::cpu::Scratch* scratch = jgg::cpu::ThreadScratch();
  char* const bytes = reinterpret_cast<char*>(scratch);
  float one = 1, out = -1;
  const jgg::cpu::Matrix matrix{&one, 1, 1, jgg::DType::kF32};
  const jgg::cpu::Product product{0, 1, 1, matrix, matrix};
  const auto call = [](const void* context, int64_t) {
    return *static_cast<const jgg::cpu::Product*>(context);
  };
  for (const int64_t count : {0, 1}) {
    std::memset(bytes, 0x5a, sizeof *scratch);
    gemm(1, 1, {count, call, &product}, {&out, 1, 1, jgg::DType::kF32}, scratch);
    const auto written =
        std::count_if(bytes, bytes + sizeof *scratch, [](char byte) { return byte != 0x5a; });
    if (out != static_cast<float>(count) || written > count * 4096) {
      Problem("a small product writes " + std::to_string(written) + " bytes of scratch");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  is_harness = true;
  if (argc != 3) return 100;
  random_bits.seed(std::strtoull(argv[1], nullptr, 10));
  TryFrame();
  for (const int threads : {0, 1, 2, 4}) {
    for (const int64_t count : {1, 2, 50}) {
      for (const int64_t bad : {int64_t{-1}, int64_t{0}, count / 2, count - 1}) {
        TryThrowing(threads, count, bad);
      }
    }
  }
  for (const jgg::cpu::Gemm gemm : Gemms()) {
    TrySmall(gemm);
    for (const auto dtype : {jgg::DType::kF32, jgg::DType::kBF16, jgg::DType::kF16}) {
      TryLongSum(gemm, 1, 1 << 18, dtype);
      TryLongSum(gemm, 1 << 16, 3, dtype);
    }
  }
  const int cases = std::atoi(argv[2]);
  for (int number = 0; number < cases; ++number) TryCase(number);
  std::printf("%d cases, %d problems\n", cases, problems);
  return problems == 0 ? 0 : 1;
}

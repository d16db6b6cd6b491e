// Random calls with quantized weights of every format, for cpu_handlers.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu_cases.h"
#include "quantized/formats.h"

namespace {

// The value of a code, or of an E4M3 scale.
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
  const bool has_middle = Below(2);  // a code that is zero
  for (int64_t i = 0; i < w.scales->count; ++i) {
    if (scale_dtype == XLA_FFI_DataType_U8) {
      w.scales->data[i] =
          static_cast<char>(format.scale == jgg::ScaleType::kE4M3 ? Below(0x50) : 110 + Below(20));
    } else {
      w.scales->Set(i, (Below(2001) - 1000) / 65536.0f);
      const int half = 1 << (format.bits - 1);
      const float bias = (Below(2001) - 1000) / 1024.0f;
      if (affine) w.biases->Set(i, has_middle ? -half * w.scales->Get(i) : bias);
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
  Case c{in_blocks ? jgg::JggQmmFp8Cpu : jgg::JggQmmCpu,
         {},
         MatrixOf(SomeDtype(), {rows_y, n}, false),
         {},
         true,
         {},
         {}};
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
  const Flags qmm{
      "qmm", {{"in_order", in_order}, {"planned", false}, {"tf32", false}, {"transpose_w", tw}}};
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

}  // namespace

// Random calls of quantize, for cpu_handlers.cc: groups of every kind, encoded by each instruction
// set, and by the handler with any number of threads, as the device's functions encode them.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/encode.h"
#include "cpu_cases.h"
#include "quantized/device/coders.cuh"
#include "quantized/quantized.h"

namespace {

struct EncodeKernel {
  const char* name;
  jgg::cpu::Encode encode;
};

std::vector<EncodeKernel> EncodeKernels() {
  std::vector<EncodeKernel> all = {{"portable", jgg::cpu::EncodeBaseline}};
#ifdef JGG_X86_LEVELS
  const auto best = jgg::cpu::BestEncode();
  if (best != jgg::cpu::EncodeBaseline) all.push_back({"AVX2", jgg::cpu::EncodeV3});
  if (best == jgg::cpu::EncodeV4) all.push_back({"AVX-512", jgg::cpu::EncodeV4});
#endif
  return all;
}

jgg::DType DTypeOf(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_F32    ? jgg::DType::kF32
         : dtype == XLA_FFI_DataType_BF16 ? jgg::DType::kBF16
                                          : jgg::DType::kF16;
}

// An array and what it becomes.
struct Encoded {
  const jgg::FormatFacts& format;
  int64_t size, groups, scales;  // of a group; all groups; global scales, or 0
  std::unique_ptr<Array> w, factors;
  int scale_bytes = 1;
  std::vector<uint8_t> codes, group_scales, biases;  // as they should be

  int64_t CodeBytes() const { return size * format.bits / 8; }
  float Factor(int64_t group) const {
    return scales == 0 ? 1.0f
                       : reinterpret_cast<float*>(factors->data.get())[group * scales / groups];
  }
  jgg::device::Inverse InverseOf(int64_t group) const {
    if (scales == 0) return {1.0f, 0};
    return jgg::device::MakeInverse<jgg::DType::kF32>(Factor(group));
  }
};

// Numbers of one kind: of a normal size, far from zero, equal, tiny, huge, few, or any bits.
void FillGroup(Array& w, int64_t begin, int64_t count) {
  const int64_t kind = Below(12);
  const float size =
      std::ldexp(1.0f, static_cast<int>(Below(kind == 3 ? 250 : 20)) - (kind == 3 ? 140 : 10));
  const float base = (Below(2001) - 1000) / 512.0f;
  for (int64_t i = begin; i < begin + count; ++i) {
    float value = (Below(200001) - 100000) / 40000.0f * size;
    if (kind == 0) value = 1000 + (Below(2001) - 1000) / 65536.0f;
    if (kind == 1) value = base;
    if (kind == 2) value = (Below(31) - 15) / 4.0f;  // ties
    if (kind == 4) value = Below(2) ? 0.0f : -0.0f;
    w.Set(i, value);
    if (kind == 5 || (kind == 6 && Below(40) == 0)) {
      for (int byte = 0; byte < w.Bytes(); ++byte) {
        w.data[i * w.Bytes() + byte] = static_cast<char>(random_bits());
      }
    }
    if (kind == 7 && Below(30) == 0) w.Set(i, Below(2) ? INFINITY : NAN);
  }
}

// The codes and scales of a group by the device's functions for any numbers.
void EncodeOne(Encoded& e, int64_t group) {
  std::vector<float> numbers(e.size);
  for (int64_t i = 0; i < e.size; ++i) {
    numbers[i] = static_cast<float>(e.w->Get(group * e.size + i));
    if (e.w->dtype == XLA_FFI_DataType_F16) {  // Get has no Inf, nor NaN
      const uint16_t bits = reinterpret_cast<const uint16_t*>(e.w->data.get())[group * e.size + i];
      if ((bits & 0x7c00) == 0x7c00)
        numbers[i] = bits & 0x3ff ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    }
  }
  jgg::device::DispatchCoder<jgg::DType::kF32>(
      e.format.mode, e.format.bits, e.scales != 0, [&](auto coder) {
        using Coder = decltype(coder);
        constexpr int kBytes = Coder::kBits * Coder::kCount / 8;
        typename Coder::X x[8];
        std::memcpy(x, numbers.data(), e.size * 4);
        auto part = Coder::Of(x[0]);
        const int64_t parts = e.size / Coder::kCount;
        for (int64_t i = 1; i < parts; ++i) part = Coder::Join(part, Coder::Of(x[i]));
        const auto made = Coder::Make(part, e.InverseOf(group));
        for (int64_t i = 0; i < parts; ++i) {
          uint32_t words[(kBytes + 3) / 4] = {};
          Coder::Encode(x[i], made, jgg::device::kNvfp4Times, words);
          Coder::Exactly(x[i], made, words);
          Coder::Finish(made, words);
          std::memcpy(e.codes.data() + (group * parts + i) * kBytes, words, kBytes);
        }
        const auto store = [&](std::vector<uint8_t>& to, uint32_t bits) {
          const float number = jgg::device::AsFloat(bits);
          if (e.scale_bytes == 2) {
            bits = e.w->dtype == XLA_FFI_DataType_BF16
                       ? jgg::device::Narrow<jgg::DType::kBF16>(number)
                       : jgg::device::Narrow<jgg::DType::kF16>(number);
          }
          std::memcpy(to.data() + group * e.scale_bytes, &bits, e.scale_bytes);
        };
        store(e.group_scales, Coder::Scale(made));
        if constexpr (Coder::kBias) store(e.biases, Coder::Bias(made));
      });
}

Encoded SomeEncoded(int64_t rows, int64_t row_groups) {
  const jgg::FormatFacts* format = nullptr;
  while (format == nullptr || !format->is_linear) {
    format = &jgg::kFormats[Below(jgg::kFormats.size())];
  }
  int64_t size = 16;
  while (!format->takes_group_size(size) || Below(3) == 0) size = size == 128 ? 16 : 2 * size;
  if (format->bits % 2 != 0 && size == 16) row_groups *= 2;  // whole words
  const XLA_FFI_DataType dtype = SomeDtype();
  const int64_t groups = rows * row_groups;
  Encoded e{*format,
            size,
            groups,
            0,
            std::make_unique<Array>(dtype, std::vector<int64_t>{rows, row_groups * size}),
            {},
            1,
            {},
            {},
            {}};
  const bool affine = format->scale == jgg::ScaleType::kScaleAndBias;
  if (affine) e.scale_bytes = e.w->Bytes();
  if (format->takes_global_scale && Below(2)) e.scales = Below(2) ? 1 : rows;
  e.factors = std::make_unique<Array>(XLA_FFI_DataType_F32, std::vector<int64_t>{e.scales});
  for (int64_t i = 0; i < e.scales; ++i) {
    constexpr float kOdd[] = {0.0f, -0.0f, INFINITY, NAN, 1e-40f, 3e38f, -1e-3f, -2.0f};
    e.factors->Set(i, Below(3) == 0 ? kOdd[Below(8)] : (1 + Below(1000)) / 65536.0f);
  }
  for (int64_t g = 0; g < groups; ++g) FillGroup(*e.w, g * size, size);
  e.codes.resize(groups * e.CodeBytes());
  e.group_scales.resize(groups * e.scale_bytes);
  e.biases.resize(affine ? groups * e.scale_bytes : 0);
  for (int64_t g = 0; g < groups; ++g) EncodeOne(e, g);
  return e;
}

// Groups that are not odd are those of the device, whatever the instructions; most are not odd.
void TryEncode(const std::string& what) {
  const int64_t count = 1 + Below(40);
  const Encoded e = SomeEncoded(1, count);
  const float factor = e.groups == 0 ? 1.0f : e.InverseOf(0).value;
  for (const EncodeKernel& kernel : EncodeKernels()) {
    std::vector<uint8_t> codes(e.codes.size()), scales(e.group_scales.size()),
        biases(e.biases.size());
    const std::unique_ptr<bool[]> odd(new bool[e.groups]);
    kernel.encode({e.format.mode, e.format.bits, e.size, e.groups, e.w->data.get(),
                   DTypeOf(e.w->dtype), codes.data(), scales.data(), biases.data(), factor},
                  odd.get());
    int64_t odd_ones = 0, wrong = 0;
    for (int64_t g = 0; g < e.groups; ++g) {
      const auto same = [&](const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                            int64_t bytes) {
        return a.empty() || std::memcmp(a.data() + g * bytes, b.data() + g * bytes, bytes) == 0;
      };
      odd_ones += odd[g];
      wrong += !odd[g] && !(same(codes, e.codes, e.CodeBytes()) &&
                            same(scales, e.group_scales, e.scale_bytes) &&
                            same(biases, e.biases, e.scale_bytes));
    }
    if (wrong != 0) {
      Problem(what + std::string(e.format.name) + std::to_string(e.format.bits) + " in groups of " +
              std::to_string(e.size) + ", " + kernel.name + ": " + std::to_string(wrong) +
              " groups are wrong");
    }
    if (odd_ones != 0 && e.biases.empty()) Problem(what + "odd groups of small floats");
  }
}

// w (matrices * n, k) as (matrices, k, n).
std::unique_ptr<Array> Exchanged(const Array& w, int64_t matrices) {
  const int64_t n = w.shape[0] / matrices, k = w.shape[1], bytes = w.Bytes();
  auto out = std::make_unique<Array>(w.dtype, std::vector<int64_t>{matrices, k, n});
  for (int64_t row = 0; row < w.shape[0]; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t at = (row / n * k + i) * n + row % n;
      std::memcpy(&out->data[at * bytes], &w.data[(row * k + i) * bytes], bytes);
    }
  }
  return out;
}

// The handler, with some number of threads. It takes w in lines, or quantized across them.
void TryQuantize(const std::string& what) {
  const bool across = Below(2);
  const int64_t matrices = 1 + Below(3);
  const int64_t rows = across ? matrices * Below(50) : Below(6);
  const int64_t row_groups = Below(8) == 0 ? (across ? 70 : 2000) : Below(12);
  Encoded e = SomeEncoded(rows, row_groups);
  const int64_t k = e.w->shape[1], columns = k / e.size;
  const bool affine = !e.biases.empty() || e.format.scale == jgg::ScaleType::kScaleAndBias;
  const auto scale_dtype = affine ? e.w->dtype : XLA_FFI_DataType_U8;
  const std::string name(e.format.name);
  const std::vector<Flags> flags{{"quantized",
                                  {{"biases", affine},
                                   {"bits", e.format.bits},
                                   {"global_scale", e.scales != 0},
                                   {"group_size", static_cast<int32_t>(e.size)},
                                   {"layout", "linear"},
                                   {"mode", name.c_str()}}}};
  const std::unique_ptr<Array> exchanged = across ? Exchanged(*e.w, matrices) : nullptr;
  std::vector<Array*> operands{across ? exchanged.get() : e.w.get()};
  if (e.scales != 0) operands.push_back(e.factors.get());
  for (const int threads : {0, 1, 4}) {
    Pool some(threads);
    pool = &some;
    Array codes(XLA_FFI_DataType_U32, {rows, k * e.format.bits / 32});
    Array scales(scale_dtype, {rows, columns}), biases(scale_dtype, {rows, columns});
    std::vector<Array*> results{&codes, &scales};
    if (affine) results.push_back(&biases);
    const Result result = Call(jgg::JggQuantizeCpu, operands, results, flags);
    if (!result.ok) {
      Problem(what + result.message);
      continue;
    }
    const auto same = [](const Array& a, const std::vector<uint8_t>& b) {
      return b.empty() || std::memcmp(a.data.get(), b.data(), b.size()) == 0;
    };
    if (!same(codes, e.codes) || !same(scales, e.group_scales) || !same(biases, e.biases)) {
      Problem(what + name + std::to_string(e.format.bits) + " of " + std::to_string(rows) + " x " +
              std::to_string(k) + (across ? " across" : "") + ": wrong bytes");
    }
  }
}

}  // namespace

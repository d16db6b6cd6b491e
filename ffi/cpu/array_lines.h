// Lines of arrays, whose numbers need no decoding, in vectors of one instruction set: as vectors.h,
// all of it is the including file's own.
#pragma once

#include <stdint.h>
#include <string.h>

#include "cpu/decoding.h"

namespace jgg::cpu {
namespace {

template <DType kDType>
Vector LoadAs(const uint8_t* at) {
  if constexpr (kDType == DType::kF32) return Load(reinterpret_cast<const float*>(at));
  return LoadFloats(at, kDType);
}

template <DType kDType>
const uint8_t* NumbersAt(const Lines& lines, int64_t line, int64_t first) {
  return lines.codes + line * lines.line_bytes + first * SizeOf(kDType);
}

// The last `count` numbers of a line, and zeros.
template <DType kDType>
Vector LoadLast(const uint8_t* at, int64_t count) {
  uint8_t some[kLanes * SizeOf(kDType)] = {};
  memcpy(some, at, count * SizeOf(kDType));
  return LoadAs<kDType>(some);
}

// body(i, v) with kLanes numbers from number i on.
template <DType kDType, typename Body>
void EachVector(const uint8_t* at, int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, LoadAs<kDType>(at + i * SizeOf(kDType)));
  if (i < count) body(i, LoadLast<kDType>(at + i * SizeOf(kDType), count - i));
}

template <DType kDType>
void ReadArray(const void* context, int64_t line, int64_t first, int64_t count, float* out) {
  const Lines& lines = *static_cast<const Lines*>(context);
  EachVector<kDType>(NumbersAt<kDType>(lines, line, first), count,
                     [&](int64_t i, Vector v) { Store(out + i, v); });
}

template <DType kDType>
Vector MultiplyArrayLine(const Lines& lines, int64_t line, int64_t first, int64_t count,
                         const float* x, const Ahead&) {
  Vector sum = {};
  EachVector<kDType>(NumbersAt<kDType>(lines, line, first), count,
                     [&](int64_t i, Vector v) { sum = MultiplyAdd(v, Load(x + i), sum); });
  return sum;
}

template <DType kDType>
void AddArrayLine(const Lines& lines, int64_t line, int64_t first, int64_t count, float x,
                  float* sum, const Ahead&) {
  const Vector number = All(x);
  EachVector<kDType>(NumbersAt<kDType>(lines, line, first), count, [&](int64_t i, Vector v) {
    Store(sum + i, MultiplyAdd(v, number, Load(sum + i)));
  });
}

// body(i, w) with kLanes numbers, from number i on, of each of kLinesTogether lines. `count` is
// whole units, or false is returned.
template <DType kDType, typename Body>
bool EachOfLines(const Lines& lines, int64_t line, int64_t first, int64_t count, const Ahead& ahead,
                 const Body& body) {
  if (count % kUnit != 0) return false;
  const uint8_t* at = NumbersAt<kDType>(lines, line, first);
  constexpr int64_t kStep = kCacheLine / SizeOf(kDType);
  static_assert(kUnit % kLanes == 0 && kStep % kLanes == 0);
  for (int64_t i = 0; i < count; i += kLanes, at += kLanes * SizeOf(kDType)) {
    Vector w[kLinesTogether];
    for (int l = 0; l < kLinesTogether; ++l) {
      const uint8_t* const from = at + l * lines.line_bytes;
      if (i % kStep == 0) Fetch(from, ahead.codes, kCacheLine);
      w[l] = LoadAs<kDType>(from);
    }
    body(i, w);
  }
  return true;
}

template <DType kDType>
bool MultiplyArrayLines(const Lines& lines, int64_t line, int64_t first, int64_t count,
                        const float* x, const Ahead& ahead, Vector* sums) {
  Vector sum[kLinesTogether] = {};
  const bool done =
      EachOfLines<kDType>(lines, line, first, count, ahead, [&](int64_t i, const Vector* w) {
        const Vector row = Load(x + i);
        for (int l = 0; l < kLinesTogether; ++l) sum[l] = MultiplyAdd(w[l], row, sum[l]);
      });
  for (int l = 0; l < kLinesTogether; ++l) sums[l] = sum[l];
  return done;
}

template <DType kDType>
bool AddArrayLines(const Lines& lines, int64_t line, int64_t first, int64_t count, const float* x,
                   const Ahead& ahead, float* sum) {
  Vector number[kLinesTogether];
  for (int l = 0; l < kLinesTogether; ++l) number[l] = All(x[l]);
  return EachOfLines<kDType>(lines, line, first, count, ahead, [&](int64_t i, const Vector* w) {
    Vector v = Load(sum + i);
    for (int l = 0; l < kLinesTogether; ++l) v = MultiplyAdd(w[l], number[l], v);
    Store(sum + i, v);
  });
}

}  // namespace
}  // namespace jgg::cpu

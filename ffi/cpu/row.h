// How one row of x meets lines of weights, in vectors of one instruction set: as
// vectors.h, all of it is the including file's own.
#pragma once

#include <stdint.h>

#include "cpu/array_lines.h"
#include "cpu/decoding.h"

namespace jgg::cpu {
namespace {

// ---- a line at a time ----

// Values are added to sums of products with a row of x, which is in InnerOrder.
struct ToSum {
  static constexpr bool kInner = true, kInARow = true;
  const float* x;
  Ahead ahead;
  Vector sum = {};

  void operator()(Vector v) {
    sum = MultiplyAdd(v, Load(x), sum);
    x += kLanes;
  }
};

// To a row of sums of products with a number, which is in InnerOrder.
struct ToRow {
  static constexpr bool kInner = true, kInARow = true;
  Vector number;
  Ahead ahead;
  float* sum;

  void operator()(Vector v) {
    Store(sum, MultiplyAdd(v, number, Load(sum)));
    sum += kLanes;
  }
};

template <typename D>
Vector MultiplyLine(const Lines& lines, int64_t line, int64_t first, int64_t count, const float* x,
                    const Ahead& ahead) {
  return Decode<D>(lines, line, first, count, ToSum{x, ahead}).sum;
}

// sum += a line times x, whole units in InnerOrder.
template <typename D>
void AddLine(const Lines& lines, int64_t line, int64_t first, int64_t count, float x, float* sum,
             const Ahead& ahead) {
  Decode<D>(lines, line, first, count, ToRow{All(x), ahead, sum});
}

// `count` numbers in the order that MultiplyLine has them in, whole units.
template <int kBits>
void ToInnerOrder(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) Store(out + i, LoadInInnerOrder<kBits>(x + i));
}

// ---- four lines at a time ----

// As ToSum, for each line.
struct ToLineSums {
  const float* x;
  Vector sums[kLinesTogether] = {};

  template <int kVectors>
  struct Some {
    Vector x[kVectors];
  };
  template <int kVectors>
  Some<kVectors> Begin() const {
    Some<kVectors> some;
    for (int i = 0; i < kVectors; ++i) some.x[i] = Load(x + i * kLanes);
    return some;
  }
  template <int kVectors>
  void Add(Some<kVectors>& some, int l, int i, Vector v) {
    sums[l] = MultiplyAdd(v, some.x[i], sums[l]);
  }
  template <int kVectors>
  void End(const Some<kVectors>&) {
    x += kVectors * kLanes;
  }
};

// As ToRow, a number for each line.
struct ToRowOfSums {
  float* sum;
  Vector numbers[kLinesTogether];

  template <int kVectors>
  struct Some {
    Vector sum[kVectors];
  };
  template <int kVectors>
  Some<kVectors> Begin() const {
    Some<kVectors> some;
    for (int i = 0; i < kVectors; ++i) some.sum[i] = Load(sum + i * kLanes);
    return some;
  }
  template <int kVectors>
  void Add(Some<kVectors>& some, int l, int i, Vector v) {
    some.sum[i] = MultiplyAdd(v, numbers[l], some.sum[i]);
  }
  template <int kVectors>
  void End(const Some<kVectors>& some) {
    for (int i = 0; i < kVectors; ++i) Store(sum + i * kLanes, some.sum[i]);
    sum += kVectors * kLanes;
  }
};

// Scales of lines that are read together, at one address: a loop has few registers for addresses.
struct LineScales {
  alignas(64) float first[kLinesTogether][kMostGroups], second[kLinesTogether][kMostGroups];
  alignas(64) float above[kLinesTogether][kMostGroups];  // biases of LoadAbove's numbers

  // Of float32 scales: whether they end in so many zero bits as codes have, so that products with
  // numbers of so many are exact.
  bool exact = false;
  // And whether `above` is exact.
  bool has_above = false;
};

// Those of groups [group, group + groups) of lines from `line` on. NaN as ReadScales has it.
template <ScaleType kScale, bool kAnyNan, int kBits>
void ReadLineScales(const Lines& lines, int64_t line, int64_t group, int64_t groups,
                    LineScales* out) {
  const int64_t size = kScale == ScaleType::kScaleAndBias ? SizeOf(lines.scale_dtype) : 1;
  const int64_t stride = lines.line_scales * size;
  const uint8_t* const scales = lines.scales + line * stride + group * size;
  const int64_t most = (groups + kLanes - 1) / kLanes * kLanes * size;
  if (scales + (kLinesTogether - 1) * stride + most > lines.scales_end) {
    for (int l = 0; l < kLinesTogether; ++l) {
      Scales some;
      ReadScales<kScale, false>(lines, line + l, group, groups, &some);  // copies
      memcpy(out->first[l], some.first, sizeof out->first[l]);
      memcpy(out->second[l], some.second, sizeof out->second[l]);
    }
    return;
  }
  constexpr bool kAbove = kScale == ScaleType::kScaleAndBias && HasAbove<kBits>();
  Ints last = {}, rounded = {};
  const auto read = [&](auto load) {
    for (int l = 0; l < kLinesTogether; ++l) {
      for (int64_t i = 0; i < groups; i += kLanes) {
        const Scale scale = load(l, l * stride + i * size);
        Store(out->first[l] + i, scale.first);
        Store(out->second[l] + i, scale.second);
        last |= Bits(scale.first);
        if constexpr (kAbove) {
          const Vector lower = scale.first * All(float{1 << kBits}), above = scale.second - lower;
          Store(out->above[l] + i, above);
          rounded |= (above + lower != scale.second) | (scale.second - above != lower);
        }
      }
    }
  };
  if constexpr (kScale == ScaleType::kScaleAndBias) {
    const uint8_t* const biases = lines.biases + (scales - lines.scales);
    const auto floats = [&](auto of) {
      read([&](int, int64_t at) { return Scale{of(scales + at), of(biases + at)}; });
    };
    using Halves = const uint16_t*;
    switch (lines.scale_dtype) {
      case DType::kF32:
        floats([](const uint8_t* at) {
          if constexpr (!kAnyNan) return LoadFloats(at, DType::kF32);
          return Load(reinterpret_cast<const float*>(at));
        });
        break;
      case DType::kBF16:
        floats([](const uint8_t* at) { return LoadBf16(reinterpret_cast<Halves>(at)); });
        break;
      case DType::kF16:
        floats([](const uint8_t* at) { return LoadHalves(reinterpret_cast<Halves>(at)); });
    }
  } else {
    const float* const factors = lines.factors;
    read([&](int l, int64_t at) {
      const float factor =
          factors == nullptr ? 1.0f : factors[(line + l) / lines.lines * lines.factor_stride];
      return LoadScales<kScale>(lines, scales + at, scales + at, factor);
    });
  }
  out->exact = !AnyNegative(-(last & ((1 << kBits) - 1)));
  if constexpr (kAbove) out->has_above = out->exact && !AnyNegative(rounded);
}

// Whole groups of `kVectors` registers, of which kMost at a time have their numbers in registers.
template <typename D, int kVectors, typename To>
void DecodeTogether(const LineScales& scales, int64_t groups, const uint8_t* at, int64_t line_bytes,
                    int64_t ahead, To* to_) {
  constexpr int kMost = kLanes / 2, kSome = kVectors < kMost ? kVectors : kMost;
  constexpr int kStep = kLanes * D::Format::kBits / 8, kBytes = kVectors * kStep;
  constexpr int kEach = kBytes < kCacheLine ? kCacheLine / kBytes : 1;  // groups of a cache line
  To to = *to_;                                                         // in registers
  for (int64_t begin = 0; begin < groups; begin += kEach) {
    for (int l = 0; l < kLinesTogether; ++l) Fetch(at + l * line_bytes, ahead, kBytes);
    const int64_t end = Min(begin + kEach, groups);
    for (int64_t g = begin; g < end; ++g) {
      for (int first = 0; first < kVectors; first += kSome) {
        auto some = to.template Begin<kSome>();
#pragma GCC unroll 4
        for (int l = 0; l < kLinesTogether; ++l) {
          const auto& second = D::kAbove ? scales.above : scales.second;
          const Group<D> values({All(scales.first[l][g]), All(second[l][g])});
#pragma GCC unroll 16
          for (int i = 0; i < kSome; ++i) {
            to.template Add<kSome>(some, l, i,
                                   values.template Read<true>(at + l * line_bytes + i * kStep));
          }
        }
        to.template End<kSome>(some);
        at += kSome * kStep;
      }
    }
  }
  *to_ = to;
}

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

// Elements [first, first + count) of kLinesTogether lines, or false: where that is not whole
// groups, or a line is the last in memory.
template <typename D, typename To>
bool DecodeLines(const Lines& lines, int64_t line, int64_t first, int64_t count, const Ahead& ahead,
                 To* to) {
  constexpr int kBits = D::Format::kBits;
  constexpr ScaleType kScale = D::Format::kScale;
  if constexpr (kScale == ScaleType::kFloat32) {
    return false;
  } else {
    // Groups have a power of two.
    if (((first | count) & (lines.group - 1)) != 0) return false;
    const uint8_t* at = lines.codes + line * lines.line_bytes + first * kBits / 8;
    const int64_t bytes = (kLinesTogether - 1) * lines.line_bytes + count * kBits / 8;
    if (at + bytes + kOverread > lines.codes_end) return false;
    const int64_t end = (first + count) >> lines.group_bits;
    for (int64_t group = first >> lines.group_bits; group < end;) {
      const int64_t groups = Min(kMostGroups, end - group), codes = groups * lines.group;
      LineScales scales;
      ReadLineScales<kScale, D::kRounds == DType::kF32, kBits>(lines, line, group, groups, &scales);
      if constexpr (kScale == ScaleType::kScaleAndBias) {
        const int64_t size = SizeOf(lines.scale_dtype);
        for (int l = 0; l < kLinesTogether; ++l) {
          const int64_t begin = ((line + l) * lines.line_scales + group) * size;
          Fetch(lines.scales + begin, ahead.scales, groups * size);
          Fetch(lines.biases + begin, ahead.scales, groups * size);
        }
      }
      const auto decode = [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        // Scales of GGUF's types have 18 digits at most.
        if constexpr (kScale == ScaleType::kScaleAndBias && HasAbove<kBits>()) {
          if (scales.has_above) {
            using Above = Decoding<typename D::Format, D::kRounds, true, true>;
            DecodeTogether<Above, kVectors>(scales, groups, at, lines.line_bytes, ahead.codes, to);
            return;
          }
        }
        if constexpr (kScale == ScaleType::kScaleAndBias && !D::kExact) {
          if (scales.exact) {
            using Exact = Decoding<typename D::Format, D::kRounds, true>;
            DecodeTogether<Exact, kVectors>(scales, groups, at, lines.line_bytes, ahead.codes, to);
            return;
          }
        }
        DecodeTogether<D, kVectors>(scales, groups, at, lines.line_bytes, ahead.codes, to);
      };
      switch (lines.group) {
        case 16: decode(Number<16 / kLanes>()); break;
        case 32: decode(Number<32 / kLanes>()); break;
        case 64: decode(Number<64 / kLanes>()); break;
        default: decode(Number<128 / kLanes>());
      }
      group += groups;
      at += codes * kBits / 8;
    }
    return true;
  }
}

// sums[l] = line + l times x.
template <typename D>
bool MultiplyLines(const Lines& lines, int64_t line, int64_t first, int64_t count, const float* x,
                   const Ahead& ahead, Vector* sums) {
  ToLineSums to{x};
  if (!DecodeLines<D>(lines, line, first, count, ahead, &to)) return false;
  for (int l = 0; l < kLinesTogether; ++l) sums[l] = to.sums[l];
  return true;
}

// sum += the lines, each times its number of x.
template <typename D>
bool AddLines(const Lines& lines, int64_t line, int64_t first, int64_t count, const float* x,
              const Ahead& ahead, float* sum) {
  ToRowOfSums to{sum, {}};
  for (int l = 0; l < kLinesTogether; ++l) to.numbers[l] = All(x[l]);
  return DecodeLines<D>(lines, line, first, count, ahead, &to);
}

// ---- all of it for a format ----

struct Decoders {
  LineKernels::Read read;
  Vector (*multiply)(const Lines&, int64_t, int64_t, int64_t, const float*, const Ahead&);
  void (*add)(const Lines&, int64_t, int64_t, int64_t, float, float*, const Ahead&);
  bool (*multiply_lines)(const Lines&, int64_t, int64_t, int64_t, const float*, const Ahead&,
                         Vector*);
  bool (*add_lines)(const Lines&, int64_t, int64_t, int64_t, const float*, const Ahead&, float*);
  void (*order)(const float*, int64_t, float*);  // null: x stays as it is
  int (*place)(int);                             // of a lane among its unit's elements
};

template <typename D>
constexpr Decoders DecodersFor() {
  constexpr int kBits = D::Format::kBits;
  return {ReadLine<D>,      MultiplyLine<D>,
          AddLine<D>,       MultiplyLines<D>,
          AddLines<D>,      InnerOrder<kBits>(1) == 1 ? nullptr : ToInnerOrder<kBits>,
          InnerOrder<kBits>};
}

int SamePlace(int lane) { return lane; }

template <DType kDType>
constexpr Decoders ArrayDecoders() {
  return {ReadArray<kDType>,
          MultiplyArrayLine<kDType>,
          AddArrayLine<kDType>,
          MultiplyArrayLines<kDType>,
          AddArrayLines<kDType>,
          nullptr,
          SamePlace};
}

template <typename Format, DType kRounds>
Decoders DecodersOf(const Lines& lines) {
  if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
    if (lines.scale_dtype != DType::kF32) return DecodersFor<Decoding<Format, kRounds, true>>();
  }
  return DecodersFor<Decoding<Format, kRounds, false>>();
}

// Values that x's dtype holds anyway are not rounded.
Decoders DecodersOf(const Lines& lines) {
  if (lines.array) {
    switch (lines.scale_dtype) {
      case DType::kF32: return ArrayDecoders<DType::kF32>();
      case DType::kBF16: return ArrayDecoders<DType::kBF16>();
      case DType::kF16: return ArrayDecoders<DType::kF16>();
    }
  }
  return Formats::Dispatch(lines.mode, lines.bits, [&](auto format) {
    using Format = decltype(format);
    constexpr bool kAffine = Format::kScale == ScaleType::kScaleAndBias;
    if constexpr (kAffine) {
      if (lines.rounds == DType::kBF16) return DecodersOf<Format, DType::kBF16>(lines);
    }
    if constexpr (kAffine || Format::kScale == ScaleType::kE8M0) {
      if (lines.rounds == DType::kF16) return DecodersOf<Format, DType::kF16>(lines);
    }
    return DecodersOf<Format, DType::kF32>(lines);
  });
}

LineKernels::Read Decoder(const Lines& lines) { return DecodersOf(lines).read; }

}  // namespace
}  // namespace jgg::cpu

// CPU handler of quantize: w (R, K), or (B, K, N) for R = B * N, in groups along K, to codes,
// scales and biases. Groups that float32 arithmetic may not encode as the definition does are
// encoded one by one.

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/encode.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "handlers.h"
#include "quantized/device/coders.cuh"
#include "quantized/device/decode.cuh"
#include "quantized/quantize_bind.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

constexpr int64_t kTaskElements = 16384, kMostGroup = 128;

// XLA's threads take subnormal numbers for zeros, which the definition does not.
class ExactFloats {
 public:
  ExactFloats() {
    std::fegetenv(&environment_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ExactFloats() { std::fesetenv(&environment_); }
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;

 private:
  std::fenv_t environment_;
};

// Groups of one global scale, one after another.
class GroupEncoder {
 public:
  explicit GroupEncoder(const QuantizeArgs& args) : args_(args), q_(args.q) {}

  // At most kTaskElements numbers, with the global scale of this number.
  void Encode(const void* w, int64_t count, int64_t scale, uint8_t* codes, uint8_t* scales,
              uint8_t* biases) const {
    const ExactFloats exact;
    const device::Inverse inverse = q_.global_scale == nullptr
                                        ? device::Inverse{1.0f, 0}
                                        : device::MakeInverse<DType::kF32>(q_.global_scale[scale]);
    const cpu::Groups groups{q_.coding.mode, q_.coding.bits, q_.group_size, count,  w,
                             args_.dtype,    codes,          scales,        biases, inverse.value};
    bool odd[kTaskElements / 16];
    cpu::BestEncode()(groups, odd);
    for (int64_t i = 0; i < count; ++i) {
      if (odd[i]) OneByOne(groups, i, inverse);
    }
  }

  int64_t CodeBytes() const { return q_.group_size * q_.coding.bits / 8; }  // of a group
  int64_t ScaleBytes() const { return q_.coding.ScaleBytes(); }

 private:
  // The device's functions for any numbers. Of 16 bits they are numbers of float32, too.
  void OneByOne(const cpu::Groups& groups, int64_t group, device::Inverse inverse) const {
    uint32_t words[kMostGroup];
    const auto* const w = static_cast<const char*>(groups.w);
    for (int64_t i = 0; i < groups.size; ++i) {
      const int64_t at = group * groups.size + i;
      uint32_t bits = 0;
      std::memcpy(&bits, w + at * Size(groups.dtype), Size(groups.dtype));
      words[i] = device::AsBits(device::ScaleOfBits(bits, groups.dtype));
    }
    const bool global = q_.global_scale != nullptr;
    device::DispatchCoder<DType::kF32>(groups.mode, groups.bits, global, [&](auto coder) {
      using Coder = decltype(coder);
      constexpr int kBytes = Coder::kBits * Coder::kCount / 8;
      typename Coder::X x[kMostGroup / Coder::kCount];
      const int64_t parts = groups.size / Coder::kCount;
      std::memcpy(x, words, groups.size * 4);
      auto part = Coder::Of(x[0]);
      for (int64_t i = 1; i < parts; ++i) part = Coder::Join(part, Coder::Of(x[i]));
      const auto made = Coder::Make(part, inverse);
      for (int64_t i = 0; i < parts; ++i) {
        uint32_t codes[(kBytes + 3) / 4] = {};
        if (Coder::Encode(x[i], made, device::kNvfp4Times, codes)) {
          Coder::Exactly(x[i], made, codes);
        }
        Coder::Finish(made, codes);
        std::memcpy(groups.codes + (group * parts + i) * kBytes, codes, kBytes);
      }
      Narrow(groups, Coder::Scale(made), groups.scales, group);
      if constexpr (Coder::kBias) Narrow(groups, Coder::Bias(made), groups.biases, group);
    });
  }

  void Narrow(const cpu::Groups& groups, uint32_t scale, uint8_t* to, int64_t group) const {
    const int bytes = ScaleBytes();
    const float number = device::AsFloat(scale);
    if (bytes == 2 && groups.dtype == DType::kBF16) scale = device::Narrow<DType::kBF16>(number);
    if (bytes == 2 && groups.dtype == DType::kF16) scale = device::Narrow<DType::kF16>(number);
    std::memcpy(to + group * bytes, &scale, bytes);  // the low ones
  }

  const QuantizeArgs& args_;
  const QuantizedArray& q_;
};

uint8_t* At(void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<uint8_t*>(data) + bytes;
}

// Tasks of w (R, K): groups that follow each other.
class Quantizer {
 public:
  explicit Quantizer(const QuantizeArgs& args)
      : args_(args),
        encoder_(args),
        groups_(args.q.elements / args.q.group_size),
        matrices_(args.q.global_scale == nullptr ? 1 : args.q.global_scales),
        task_groups_(kTaskElements / args.q.group_size) {}

  int64_t Tasks() const { return matrices_ * MatrixTasks(); }

  void Run(int64_t task) const {
    const QuantizedArray& q = args_.q;
    const int64_t matrix = task / MatrixTasks(), of_matrix = groups_ / matrices_;
    const int64_t begin = task % MatrixTasks() * task_groups_;
    const int64_t count = std::min(task_groups_, of_matrix - begin);
    const int64_t first = matrix * of_matrix + begin;
    encoder_.Encode(static_cast<const char*>(args_.w) + first * q.group_size * Size(args_.dtype),
                    count, matrix, At(q.weight, first * encoder_.CodeBytes()),
                    At(q.scales, first * encoder_.ScaleBytes()),
                    At(q.biases, first * encoder_.ScaleBytes()));
  }

 private:
  int64_t MatrixTasks() const { return (groups_ / matrices_ + task_groups_ - 1) / task_groups_; }

  const QuantizeArgs& args_;
  const GroupEncoder encoder_;
  const int64_t groups_, matrices_, task_groups_;
};

// to[j * depth + i] = from[i * stride + j], i < depth, j < columns.
template <typename T>
void Exchange(const T* from, int64_t stride, int64_t depth, int64_t columns, T* to) {
  constexpr int64_t kEach = 16 / sizeof(T), kAhead = 32;  // numbers of a register; rows
  const auto one_by_one = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    for (int64_t j = j0; j < j1; ++j) {
      for (int64_t i = i0; i < i1; ++i) to[j * depth + i] = from[i * stride + j];
    }
  };
#if defined(__SSE2__)
  const int64_t whole_i = depth / kEach * kEach, whole_j = columns / kEach * kEach;
  for (int64_t i = 0; i < whole_i; i += kEach) {
    // Rows lie in different pages, which no processor fetches ahead.
    for (int64_t r = 0; r < kEach; ++r) {
      const T* const ahead = from + (std::min(i + kAhead, depth - kEach) + r) * stride;
      for (int64_t j = 0; j < columns; j += 64 / sizeof(T)) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + j), _MM_HINT_T0);
      }
    }
    for (int64_t j = 0; j < whole_j; j += kEach) {
      __m128i v[kEach], next[kEach];
      for (int64_t r = 0; r < kEach; ++r) {
        v[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (i + r) * stride + j));
      }
      // Each step interleaves rows that are half of all apart, which exchanges the axes in the end.
      for (int64_t step = kEach; step > 1; step /= 2) {
        for (int64_t r = 0; r < kEach / 2; ++r) {
          const __m128i a = v[r], b = v[r + kEach / 2];
          if constexpr (sizeof(T) == 4) {
            next[2 * r] = _mm_unpacklo_epi32(a, b);
            next[2 * r + 1] = _mm_unpackhi_epi32(a, b);
          } else {
            next[2 * r] = _mm_unpacklo_epi16(a, b);
            next[2 * r + 1] = _mm_unpackhi_epi16(a, b);
          }
        }
        for (int64_t r = 0; r < kEach; ++r) v[r] = next[r];
      }
      for (int64_t r = 0; r < kEach; ++r) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (j + r) * depth + i), v[r]);
      }
    }
  }
  one_by_one(0, whole_i, whole_j, columns);
  one_by_one(whole_i, depth, 0, columns);
#else
  constexpr int64_t kSquare = 2 * kEach;  // cache lines of both
  for (int64_t i = 0; i < depth; i += kSquare) {
    for (int64_t j = 0; j < columns; j += kSquare) {
      one_by_one(i, std::min(i + kSquare, depth), j, std::min(j + kSquare, columns));
    }
  }
#endif
}

// Tasks of w (B, K, N): pieces of 512 x 32, which are put in order, encoded, and written to lines.
class AcrossQuantizer {
 public:
  explicit AcrossQuantizer(const QuantizeArgs& args)
      : args_(args),
        encoder_(args),
        deep_((args.k + kDepth - 1) / kDepth),
        wide_((args.n + kColumns - 1) / kColumns) {}

  int64_t Tasks() const { return args_.matrices * deep_ * wide_; }

  void Run(int64_t task) const {
    const QuantizedArray& q = args_.q;
    const int64_t matrix = task / (deep_ * wide_), k = task / wide_ % deep_ * kDepth;
    const int64_t n = task % wide_ * kColumns;
    const int64_t depth = std::min(kDepth, args_.k - k), columns = std::min(kColumns, args_.n - n);
    const int64_t in_w = (matrix * args_.k + k) * args_.n + n;
    alignas(64) uint32_t x[kTaskElements];
    if (Size(args_.dtype) == 4) {
      Exchange(static_cast<const uint32_t*>(args_.w) + in_w, args_.n, depth, columns, x);
    } else {
      Exchange(static_cast<const uint16_t*>(args_.w) + in_w, args_.n, depth, columns,
               reinterpret_cast<uint16_t*>(x));
    }
    // Lines of one global scale at a time.
    const int64_t line = matrix * args_.n + n, groups = depth / q.group_size;
    const int64_t lines_each = q.global_scale == nullptr
                                   ? args_.matrices * args_.n
                                   : args_.matrices * args_.n / q.global_scales;
    uint8_t codes[kTaskElements], scales[kTaskElements / 4], biases[kTaskElements / 4];
    const int64_t line_groups = args_.k / q.group_size, first_group = k / q.group_size;
    for (int64_t j = 0; j < columns;) {
      const int64_t scale = (line + j) / lines_each;
      const int64_t count = std::min(columns - j, (scale + 1) * lines_each - (line + j));
      encoder_.Encode(reinterpret_cast<const char*>(x) + j * depth * Size(args_.dtype),
                      count * groups, scale, codes, scales, biases);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t group = (line + j + i) * line_groups + first_group;
        const auto copy = [&](void* to, const uint8_t* from, int64_t bytes) {
          if (to == nullptr) return;
          std::memcpy(At(to, group * bytes), from + i * groups * bytes, groups * bytes);
        };
        copy(q.weight, codes, encoder_.CodeBytes());
        copy(q.scales, scales, encoder_.ScaleBytes());
        copy(q.biases, biases, encoder_.ScaleBytes());
      }
      j += count;
    }
  }

 private:
  static constexpr int64_t kDepth = 512, kColumns = kTaskElements / kDepth;
  static_assert(kDepth % kMostGroup == 0);

  const QuantizeArgs& args_;
  const GroupEncoder encoder_;
  const int64_t deep_, wide_;  // tasks of a matrix, along each axis
};

ffi::Error QuantizeCpu(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> weight, ffi::Result<ffi::AnyBuffer> scales,
                       ffi::RemainingRets more, QuantizedAttrs quantized) {
  constexpr const char* op = "quantize";
  QuantizeArgs args{};
  JGG_RETURN_IF_ERROR(BindQuantize(op, quantized, w, rest, weight, scales, more, &args, true));
  if (args.q.elements == 0) return ffi::Error::Success();
  cpu::AskForHugePages(args.q.weight, weight->size_bytes());
  const auto run = [&](const auto& quantizer) {
    cpu::ParallelFor(pool, quantizer.Tasks(), [&](int64_t task) { quantizer.Run(task); });
  };
  if (args.matrices > 0) {
    run(AcrossQuantizer(args));
  } else {
    run(Quantizer(args));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQuantizeCpu, QuantizeCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // w
                           .RemainingArgs()        // global_scale
                           .Ret<ffi::AnyBuffer>()  // weight
                           .Ret<ffi::AnyBuffer>()  // scales
                           .RemainingRets()        // biases
                           .Attr<QuantizedAttrs>("quantized"));

}  // namespace

XLA_FFI_Error* JggQuantizeCpu(XLA_FFI_CallFrame* call_frame) { return kQuantizeCpu(call_frame); }

}  // namespace jgg

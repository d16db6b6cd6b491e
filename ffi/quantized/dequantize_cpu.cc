// CPU handler of dequantize: w[r, k] = value(q[r, k]); K is grouped. Lines are decoded as products
// decode them. What float32 arithmetic may not give bit for bit is decoded one by one.

#include <cfenv>
#include <cstring>

#include "cpu/lines.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "handlers.h"
#include "quantized/device/values.cuh"
#include "quantized/lines_cpu.h"
#include "quantized/quantize_bind.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

using cpu::Lines;

// Elements of a line that a task decodes at a time: whole groups.
constexpr int64_t kPart = 4096;

// Scale number i, or bias, as bits.
uint32_t BitsAt(const uint8_t* scales, int64_t i, int bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, scales + i * bytes, bytes);
  return bits;
}

// Whether a number is zero, or far from what float32 cannot hold.
bool IsUsual(float number) {
  const uint32_t magnitude = device::AsBits(number) & ~device::kSign;
  return magnitude == 0 || (magnitude > 0x18000000 && magnitude < 0x68000000);  // 2^-79, 2^81
}

class Dequantizer {
 public:
  Dequantizer(const DequantizeArgs& args, const QuantizedWeight& w)
      : args_(args), lines_(LinesOf(w, DType::kF32)), coding_(w.coding) {}

  int64_t Tasks() const { return Rows() * Parts(); }

  void Run(int64_t task) const {
    const int64_t line = task / Parts(), first = task % Parts() * kPart;
    const int64_t count = std::min(kPart, lines_.elements - first);
    if (!IsUsualPart(line, first, count)) return OneByOne(line, first, count);
    float values[kPart + cpu::kUnit];
    cpu::BestLines().decoder(lines_)(&lines_, line, first, count, values);
    cpu::BestLines().narrow(values, count, args_.dtype, At(line, first));
  }

 private:
  int64_t Rows() const { return args_.q.elements / std::max<int64_t>(lines_.elements, 1); }
  int64_t Parts() const { return (lines_.elements + kPart - 1) / kPart; }

  char* At(int64_t line, int64_t first) const {
    return static_cast<char*>(args_.out) + (line * lines_.elements + first) * Size(args_.dtype);
  }

  float Factor(int64_t line) const {
    return lines_.factors == nullptr ? 1.0f : lines_.factors[line / lines_.lines];
  }

  // Biases of - 0 make zeros of either sign.
  bool IsUsualPart(int64_t line, int64_t first, int64_t count) const {
    const int bytes = coding_.ScaleBytes();
    const int64_t group = line * lines_.line_scales + first / lines_.group;
    for (int64_t i = group; i < group + (count + lines_.group - 1) / lines_.group; ++i) {
      const uint32_t bits = BitsAt(lines_.scales, i, bytes);
      if (coding_.HasFloatScales()) {
        const float bias =
            device::ScaleOfBits(BitsAt(lines_.biases, i, bytes), coding_.scale_dtype);
        if (!IsUsual(device::ScaleOfBits(bits, coding_.scale_dtype)) || !IsUsual(bias) ||
            device::AsBits(bias) == device::kSign) {
          return false;
        }
      } else if (coding_.Facts().scale == ScaleType::kE8M0) {
        if (bits < 20 || bits > 240) return false;
      } else if ((bits & 0x7f) == 0x7f) {
        return false;
      }
    }
    return IsUsual(Factor(line));
  }

  void OneByOne(int64_t line, int64_t first, int64_t count) const {
    // XLA's threads flush numbers that are subnormal, and the definition of affine values is
    // arithmetic that does, too. That of others is exact.
    std::fenv_t environment;
    const bool exact = !coding_.HasFloatScales();
    if (exact) {
      std::fegetenv(&environment);
      std::fesetenv(FE_DFL_ENV);
    }
    switch (args_.dtype) {
      case DType::kF32: OneByOneAs<DType::kF32>(line, first, count); break;
      case DType::kBF16: OneByOneAs<DType::kBF16>(line, first, count); break;
      case DType::kF16: OneByOneAs<DType::kF16>(line, first, count); break;
    }
    if (exact) std::fesetenv(&environment);
  }

  template <DType kTo>
  void OneByOneAs(int64_t line, int64_t first, int64_t count) const {
    const int bytes = coding_.ScaleBytes();
    const float factor = Factor(line);
    const auto* const codes =
        reinterpret_cast<const uint32_t*>(lines_.codes + line * lines_.line_bytes);
    char* const out = At(line, first);
    device::DispatchDecoder<kTo>(coding_, lines_.factors != nullptr, [&](auto decoder) {
      using Decoder = decltype(decoder);
      for (int64_t i = first; i < first + count; ++i) {
        const int64_t group = line * lines_.line_scales + i / lines_.group;
        device::UnitScales scales{BitsAt(lines_.scales, group, bytes), 0, factor, factor, 0, 0};
        if (coding_.HasFloatScales()) scales.second = BitsAt(lines_.biases, group, bytes);
        const uint32_t code = device::CodeAt<Decoder::kBits>(codes + i / 32 * Decoder::kBits,
                                                             static_cast<int>(i % 32));
        const uint32_t bits = Decoder::Value(coding_.scale_dtype, code, scales, false);
        std::memcpy(out + (i - first) * Size(kTo), &bits, Size(kTo));  // the low ones
      }
    });
  }

  const DequantizeArgs& args_;
  const Lines lines_;
  const Coding coding_;
};

ffi::Error DequantizeCpu(ffi::ThreadPool pool, ffi::AnyBuffer weight, ffi::AnyBuffer scales,
                         ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                         QuantizedAttrs quantized, bool ordered) {
  constexpr const char* op = "dequantize";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out->element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(R, K)", *out, {-1, -1}));
  if (ordered) return Unimplemented(op, "columns in another order need sm90");
  const int64_t rows = out->dimensions()[0], k = out->dimensions()[1];
  DequantizeArgs args{{}, out->untyped_data(), *ToDType(out->element_type()), ordered};
  JGG_RETURN_IF_ERROR(BindDequantize(op, quantized, weight, scales, rest, rows, k, &args.q));
  if (rows == 0 || k == 0) return ffi::Error::Success();
  QuantizedWeight w{};
  w.coding = args.q.coding;
  w.group_size = args.q.group_size;
  w.packed = args.q.weight;
  w.scales = args.q.scales;
  w.biases = args.q.biases;
  w.groups = std::max<int64_t>(args.q.global_scales, 1);
  w.lines = rows / w.groups;
  w.elements = k;
  w.global_scale = {args.q.global_scale, 1, 0};
  cpu::AskForHugePages(args.out, out->size_bytes());
  const Dequantizer dequantizer(args, w);
  cpu::ParallelFor(pool, dequantizer.Tasks(), [&](int64_t task) { dequantizer.Run(task); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kDequantizeCpu, DequantizeCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .RemainingArgs()        // biases, global_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<QuantizedAttrs>("quantized")
                           .Attr<bool>("ordered"));

}  // namespace

XLA_FFI_Error* JggDequantizeCpu(XLA_FFI_CallFrame* call_frame) {
  return kDequantizeCpu(call_frame);
}

}  // namespace jgg

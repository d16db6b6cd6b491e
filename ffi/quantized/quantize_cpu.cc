// CPU handler of quantize: w (R, K), in groups along K, to codes, scales and biases. Groups that
// float32 arithmetic may not encode as the definition does are encoded one by one.

#include <cfenv>
#include <cstring>

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

class Quantizer {
 public:
  explicit Quantizer(const QuantizeArgs& args)
      : args_(args),
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
    const ExactFloats exact;
    const device::Inverse inverse = q.global_scale == nullptr
                                        ? device::Inverse{1.0f, 0}
                                        : device::MakeInverse<DType::kF32>(q.global_scale[matrix]);
    const cpu::Groups groups{
        q.coding.mode,
        q.coding.bits,
        q.group_size,
        count,
        static_cast<const char*>(args_.w) + first * q.group_size * Size(args_.dtype),
        args_.dtype,
        At(q.weight, first, q.group_size * q.coding.bits / 8),
        At(q.scales, first, q.coding.ScaleBytes()),
        At(q.biases, first, q.coding.ScaleBytes()),
        inverse.value};
    bool odd[kTaskElements / 16];
    cpu::BestEncode()(groups, odd);
    for (int64_t i = 0; i < count; ++i) {
      if (odd[i]) OneByOne(groups, i, inverse);
    }
  }

 private:
  int64_t MatrixTasks() const { return (groups_ / matrices_ + task_groups_ - 1) / task_groups_; }

  static uint8_t* At(void* data, int64_t group, int64_t bytes) {
    return data == nullptr ? nullptr : static_cast<uint8_t*>(data) + group * bytes;
  }

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
    const bool global = args_.q.global_scale != nullptr;
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
    const int bytes = args_.q.coding.ScaleBytes();
    const float number = device::AsFloat(scale);
    if (bytes == 2 && groups.dtype == DType::kBF16) scale = device::Narrow<DType::kBF16>(number);
    if (bytes == 2 && groups.dtype == DType::kF16) scale = device::Narrow<DType::kF16>(number);
    std::memcpy(to + group * bytes, &scale, bytes);  // the low ones
  }

  const QuantizeArgs& args_;
  const int64_t groups_, matrices_, task_groups_;
};

ffi::Error QuantizeCpu(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> weight, ffi::Result<ffi::AnyBuffer> scales,
                       ffi::RemainingRets more, QuantizedAttrs quantized) {
  constexpr const char* op = "quantize";
  QuantizeArgs args{};
  JGG_RETURN_IF_ERROR(BindQuantize(op, quantized, w, rest, weight, scales, more, &args));
  if (args.q.elements == 0) return ffi::Error::Success();
  cpu::AskForHugePages(args.q.weight, weight->size_bytes());
  const Quantizer quantizer(args);
  cpu::ParallelFor(pool, quantizer.Tasks(), [&](int64_t task) { quantizer.Run(task); });
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

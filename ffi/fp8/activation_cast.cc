// CUDA handlers of an activation, and of its backward pass, whose results are cast with known
// scales as they are made; or whose largest magnitudes are found: bind, check, launch.
#include "fp8/activation_bind.h"
#include "fp8/activation_cast_sm80.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error BindLargest(const char* op, const ffi::AnyBuffer& largest, const char* letters,
                              std::initializer_list<int64_t> shape, void** to) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, "largest", largest, ffi::U32, "uint32"));
  *to = largest.untyped_data();
  return CheckShape(op, "largest", letters, largest, shape);
}

static ffi::Error BindCodes(const char* op, const char* name, const ffi::AnyBuffer& codes,
                            int64_t lines, int64_t elements, bool e5m2, void** to) {
  const auto type = e5m2 ? ffi::F8E5M2 : ffi::F8E4M3FN;
  const char* known = e5m2 ? "float8_e5m2" : "float8_e4m3fn";
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, codes, type, known));
  JGG_RETURN_IF_ERROR(CheckShape(op, name, "(lines, elements)", codes, {lines, elements}));
  *to = codes.untyped_data();
  return CheckAligned(op, {*to});
}

// Scales, `count` of them, or none. *to is null then.
static ffi::Error BindScales(const char* op, const ffi::AnyBuffer& scales, int64_t count,
                             const float** to) {
  const bool known = scales.element_count() > 0;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "scales", "(scales,)", scales, {known ? count : 0}));
  *to = known ? static_cast<const float*>(scales.untyped_data()) : nullptr;
  return ffi::Error::Success();
}

static ffi::Error Fp8ActivationCast(cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer scales,
                                    ffi::AnyBuffer sizes, ffi::RemainingRets results,
                                    std::string_view activation) {
  static constexpr const char* kOp = "fp8_activation_cast";
  Fp8ActivationCastSm80 args{};
  JGG_RETURN_IF_ERROR(BindScales(kOp, scales, 1, &args.scales));
  const size_t of_codes = args.scales != nullptr;
  auto largest = results.get<ffi::AnyBuffer>(of_codes);
  auto workspace = results.get<ffi::AnyBuffer>(of_codes + 1);
  if (results.size() != of_codes + 2 || !largest || !workspace) {
    return InvalidArgument(kOp, "expected codes, if there is a scale, largest, and a workspace");
  }
  JGG_RETURN_IF_ERROR(BindActivation(kOp, activation, h, sizes, **workspace, false, &args.of));
  JGG_RETURN_IF_ERROR(BindLargest(kOp, **largest, "(parts, 2)", {-1, 2}, &args.largest));
  args.parts = (*largest)->dimensions()[0];
  if (args.scales != nullptr) {
    auto codes = results.get<ffi::AnyBuffer>(0);
    if (!codes) return codes.error();
    JGG_RETURN_IF_ERROR(
        BindCodes(kOp, "codes", **codes, args.of.rows, args.of.columns, false, &args.codes));
  }
  return FromCuda(kOp, LaunchFp8ActivationCastSm80(stream, args));
}

static ffi::Error Fp8ActivationCastBackward(cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer d,
                                            ffi::AnyBuffer row_scale, ffi::AnyBuffer scales,
                                            ffi::AnyBuffer sizes, ffi::RemainingRets results,
                                            std::string_view activation) {
  static constexpr const char* kOp = "fp8_activation_cast_backward";
  Fp8ActivationCastBackwardSm80 args{};
  JGG_RETURN_IF_ERROR(BindScales(kOp, scales, 2, &args.scales));
  const size_t of_codes = args.scales != nullptr ? 4 : 0;
  auto largest = results.get<ffi::AnyBuffer>(of_codes);
  auto workspace = results.get<ffi::AnyBuffer>(of_codes + 1);
  if (results.size() != of_codes + 2 || !largest || !workspace) {
    return InvalidArgument(kOp, "expected codes and sums, if there are scales, largest, and a ",
                           "workspace");
  }
  JGG_RETURN_IF_ERROR(
      BindActivation(kOp, activation, h, sizes, **workspace, args.scales != nullptr, &args.of));
  const int64_t rows = args.of.rows, columns = args.of.columns;
  JGG_RETURN_IF_ERROR(BindActivationBackward(kOp, d, row_scale, &args));
  const int64_t parts = args.scales != nullptr ? args.along / 128 * (columns / 128) : -1;
  JGG_RETURN_IF_ERROR(BindLargest(kOp, **largest, "(parts, 2, 2)", {parts, 2, 2}, &args.largest));
  args.parts = (*largest)->dimensions()[0];
  if (args.scales != nullptr) {
    auto codes = results.get<ffi::AnyBuffer>(0), turned = results.get<ffi::AnyBuffer>(1),
         activated = results.get<ffi::AnyBuffer>(2), sums = results.get<ffi::AnyBuffer>(3);
    if (!codes || !turned || !activated || !sums)
      return InvalidArgument(kOp, "results are missing");
    args.e5m2 = (*codes)->element_type() == ffi::F8E5M2;
    JGG_RETURN_IF_ERROR(BindCodes(kOp, "dh", **codes, rows, 2 * columns, args.e5m2, &args.codes));
    JGG_RETURN_IF_ERROR(BindCodes(kOp, "dh along rows", **turned, 2 * columns, args.along,
                                  args.e5m2, &args.turned));
    JGG_RETURN_IF_ERROR(BindCodes(kOp, "the activation along rows", **activated, columns,
                                  args.along, false, &args.activated));
    JGG_RETURN_IF_ERROR(BindActivationSums(kOp, **sums, &args));
  }
  return FromCuda(kOp, LaunchFp8ActivationCastBackwardSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8ActivationCast, Fp8ActivationCast,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // scale, or empty
                           .Arg<ffi::AnyBuffer>()  // sizes
                           .RemainingRets()  // codes, where there is a scale; largest; workspace
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kFp8ActivationCastBackward, Fp8ActivationCastBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // h
                           .Arg<ffi::AnyBuffer>()  // d
                           .Arg<ffi::AnyBuffer>()  // row_scale
                           .Arg<ffi::AnyBuffer>()  // scales of dh and of the activation, or empty
                           .Arg<ffi::AnyBuffer>()  // sizes
                           .RemainingRets()        // codes of three, sums, where there are scales;
                                                   // largest; workspace
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8ActivationCast(XLA_FFI_CallFrame* call_frame) {
  return kFp8ActivationCast(call_frame);
}
XLA_FFI_Error* JggFp8ActivationCastBackward(XLA_FFI_CallFrame* call_frame) {
  return kFp8ActivationCastBackward(call_frame);
}

}  // namespace jgg

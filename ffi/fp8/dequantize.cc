// CUDA handler of fp8_dequantize: bind, check, launch.

#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/dequantize_sm80.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Fp8Dequantize(cudaStream_t stream, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                                ffi::Result<ffi::AnyBuffer> out, bool square) {
  constexpr const char* op = "fp8_dequantize";
  Fp8DequantizeSm80 args{};
  JGG_RETURN_IF_ERROR(CheckShape(op, "codes", "(M, R, C)", codes, {-1, -1, -1}));
  args.e5m2 = codes.element_type() == ffi::F8E5M2;
  if (!args.e5m2) {
    JGG_RETURN_IF_ERROR(
        CheckDtype(op, "codes", codes, ffi::F8E4M3FN, "float8_e4m3fn or float8_e5m2"));
  }
  const int64_t m = args.matrices = codes.dimensions()[0];
  const int64_t r = args.rows = codes.dimensions()[1];
  const int64_t c = args.columns = codes.dimensions()[2];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {m, r, c}));
  args.square = square;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "scales", "(M, blocks of lines, blocks)", scales,
                                 {m, square ? (r + 127) / 128 : r, (c + 127) / 128}));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out->element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(M, R, C)", *out, {m, r, c}));
  args.dtype = *ToDType(out->element_type());
  args.codes = codes.untyped_data();
  args.scales = static_cast<const float*>(scales.untyped_data());
  args.out = out->untyped_data();
  JGG_RETURN_IF_ERROR(CheckAligned(op, {args.codes, args.out}));
  if (auto reason = rules::Fp8DequantizeProblem(m * r, c)) return Unimplemented(op, *reason);
  return FromCuda(op, LaunchFp8DequantizeSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8Dequantize, Fp8Dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // codes
                           .Arg<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<bool>("square"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8Dequantize(XLA_FFI_CallFrame* call_frame) {
  return kFp8Dequantize(call_frame);
}

}  // namespace jgg

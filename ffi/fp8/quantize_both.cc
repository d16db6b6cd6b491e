// CUDA handler of fp8_quantize_both: bind, check, launch.

#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/quantize_both_sm80.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_quantize_both";

static ffi::Error BindX(const ffi::AnyBuffer& x, Fp8QuantizeBothSm80* args) {
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(M, R, C)", x, {-1, -1, -1}));
  args->dtype = *ToDType(x.element_type());
  args->x = x.untyped_data();
  args->matrices = x.dimensions()[0];
  args->rows = x.dimensions()[1];
  args->columns = x.dimensions()[2];
  return CheckSmall(kOp, {args->matrices, args->rows, args->columns});
}

// Codes (M, rows, columns) and their scales.
static ffi::Error BindCodes(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales,
                            int64_t matrices, int64_t rows, int64_t columns, void** to,
                            float** scales_to) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "codes", codes, ffi::F8E4M3FN, "float8_e4m3fn"));
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "codes", "(M, lines, elements)", codes, {matrices, rows, columns}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "scales", "(M, blocks of lines, blocks)", scales,
                                 {matrices, (rows + 127) / 128, (columns + 127) / 128}));
  *to = codes.untyped_data();
  *scales_to = static_cast<float*>(scales.untyped_data());
  return ffi::Error::Success();
}

static ffi::Error Fp8QuantizeBoth(cudaStream_t stream, ffi::AnyBuffer x,
                                  ffi::Result<ffi::AnyBuffer> codes,
                                  ffi::Result<ffi::AnyBuffer> scales,
                                  ffi::Result<ffi::AnyBuffer> turned,
                                  ffi::Result<ffi::AnyBuffer> turned_scales) {
  Fp8QuantizeBothSm80 args{};
  JGG_RETURN_IF_ERROR(BindX(x, &args));
  const int64_t m = args.matrices, r = args.rows, c = args.columns;
  JGG_RETURN_IF_ERROR(BindCodes(*codes, *scales, m, r, c, &args.codes, &args.scales));
  JGG_RETURN_IF_ERROR(
      BindCodes(*turned, *turned_scales, m, c, r, &args.turned, &args.turned_scales));
  for (const void* data :
       {args.x, static_cast<const void*>(args.codes), static_cast<const void*>(args.turned)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return Unimplemented(kOp, "a buffer is not aligned to 16 bytes");
    }
  }
  // As x is stored, and as its transpose is.
  for (auto reason : {rules::Fp8QuantizeProblem(r, c, r), rules::Fp8QuantizeProblem(c, r, c)}) {
    if (reason) return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchFp8QuantizeBothSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8QuantizeBoth, Fp8QuantizeBoth,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Ret<ffi::AnyBuffer>()   // codes
                           .Ret<ffi::AnyBuffer>()   // scales
                           .Ret<ffi::AnyBuffer>()   // turned
                           .Ret<ffi::AnyBuffer>(),  // turned_scales
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8QuantizeBoth(XLA_FFI_CallFrame* call_frame) {
  return kFp8QuantizeBoth(call_frame);
}

}  // namespace jgg

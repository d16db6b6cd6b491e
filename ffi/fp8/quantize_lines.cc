// CUDA handler of fp8_quantize_lines: bind, check, launch.

#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/codes_bind.h"
#include "fp8/quantize_lines_sm80.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_quantize_lines";

static ffi::Error BindOperands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& sizes,
                               const ffi::AnyBuffer& workspace, Fp8QuantizeLinesSm80* args) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "x", x, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(R, C)", x, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "sizes", sizes, ffi::S32, "int32"));
  args->x = x.untyped_data();
  args->rows = x.dimensions()[0];
  args->columns = x.dimensions()[1];
  args->sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args->groups = sizes.dimensions()[0];
  args->along = Fp8PaddedRows(args->rows, args->groups);
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->rows, args->columns, args->groups, args->along}));
  if (reinterpret_cast<uintptr_t>(args->x) % 16 != 0) {
    return Unimplemented(kOp, "a buffer is not aligned to 16 bytes");
  }
  for (int64_t along : {args->along, args->columns}) {
    if (auto reason = rules::Fp8QuantizeProblem(args->along, args->columns, along)) {
      return Unimplemented(kOp, *reason);
    }
  }
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "workspace", workspace, ffi::S32, "int32"));
  args->workspace = workspace.untyped_data();
  return CheckShape(kOp, "workspace", "(words,)", workspace,
                    {Fp8GroupsWords(args->groups, args->along / 128)});
}

static ffi::Error Fp8QuantizeLines(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer sizes,
                                   ffi::Result<ffi::AnyBuffer> row_codes,
                                   ffi::Result<ffi::AnyBuffer> row_scales,
                                   ffi::Result<ffi::AnyBuffer> column_codes,
                                   ffi::Result<ffi::AnyBuffer> column_scales,
                                   ffi::Result<ffi::AnyBuffer> workspace) {
  Fp8QuantizeLinesSm80 args{};
  JGG_RETURN_IF_ERROR(BindOperands(x, sizes, *workspace, &args));
  JGG_RETURN_IF_ERROR(
      BindFp8Codes(kOp, "codes", *row_codes, *row_scales, args.rows, args.columns, &args.by_rows));
  JGG_RETURN_IF_ERROR(BindFp8Codes(kOp, "codes along rows", *column_codes, *column_scales,
                                   args.columns, args.along, &args.by_columns));
  return FromCuda(kOp, LaunchFp8QuantizeLinesSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8QuantizeLines, Fp8QuantizeLines,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // sizes
                           .Ret<ffi::AnyBuffer>()   // codes
                           .Ret<ffi::AnyBuffer>()   // scales
                           .Ret<ffi::AnyBuffer>()   // codes along rows
                           .Ret<ffi::AnyBuffer>()   // their scales
                           .Ret<ffi::AnyBuffer>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8QuantizeLines(XLA_FFI_CallFrame* call_frame) {
  return kFp8QuantizeLines(call_frame);
}

}  // namespace jgg

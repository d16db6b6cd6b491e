// CUDA handler of fp8_quantize: bind, check, launch.

#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "fp8/attributes.h"
#include "fp8/quantize_sm80.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_quantize";

// An operand that may be left out: then it is empty.
template <typename T>
static const T* DataOrNull(const ffi::AnyBuffer& a) {
  return a.element_count() == 0 ? nullptr : static_cast<const T*>(a.untyped_data());
}

static ffi::Error BindOperands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& sizes,
                               const ffi::AnyBuffer& seed, const ffi::AnyBuffer& list,
                               Fp8QuantizeSm80* args) {
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(M, R, C)", x, {-1, -1, -1}));
  args->dtype = *ToDType(x.element_type());
  args->x = x.untyped_data();
  args->matrices = x.dimensions()[0];
  args->rows = x.dimensions()[1];
  args->columns = x.dimensions()[2];
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->matrices, args->rows, args->columns}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "sizes", sizes, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "seed", "(2,) or (0,)", seed, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "seed", seed, ffi::U32, "uint32"));
  if (seed.dimensions()[0] != 0 && seed.dimensions()[0] != 2) {
    return InvalidArgument(kOp, "seed has shape ", ShapeText(seed), ", expected (2,) or (0,)");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "list", "(R,)", list, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "list", list, ffi::S32, "int32"));
  args->list = DataOrNull<int32_t>(list);
  if (args->list != nullptr) {
    if (args->matrices != 1 || !args->along_rows || args->square) {
      return InvalidArgument(kOp, "a list is of one matrix, with blocks of 128 along its rows");
    }
    args->x_lines = args->rows;
    args->rows = list.dimensions()[0];
    JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->rows}));
  }
  args->sizes = DataOrNull<int32_t>(sizes);
  args->groups = sizes.dimensions()[0];
  args->seed = DataOrNull<uint32_t>(seed);
  if (args->sizes != nullptr && (args->matrices != 1 || args->square)) {
    return InvalidArgument(kOp, "sizes do not go with blocks of 128 x 128 or several matrices");
  }
  return ffi::Error::Success();
}

static ffi::Error BindResults(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales,
                              const ffi::AnyBuffer& workspace, Fp8QuantizeSm80* args) {
  const int64_t lines = args->along_rows ? args->columns : args->rows;
  args->along = args->along_rows ? args->rows : args->columns;
  if (args->along_rows && args->sizes != nullptr) {
    args->along = Fp8PaddedRows(args->rows, args->groups);
    JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->along}));
  }
  args->e5m2 = codes.element_type() == ffi::F8E5M2;
  if (!args->e5m2) {
    JGG_RETURN_IF_ERROR(
        CheckDtype(kOp, "codes", codes, ffi::F8E4M3FN, "float8_e4m3fn or float8_e5m2"));
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "codes", "(M, lines, elements)", codes,
                                 {args->matrices, lines, args->along}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "scales", "(M, blocks of lines, blocks)", scales,
                 {args->matrices, args->square ? (lines + 127) / 128 : lines, args->blocks()}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "workspace", workspace, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "workspace", "(words,)", workspace, {args->workspace_words()}));
  args->codes = codes.untyped_data();
  args->scales = static_cast<float*>(scales.untyped_data());
  args->workspace = workspace.untyped_data();
  for (const void* data : {args->x, static_cast<const void*>(args->codes)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return Unimplemented(kOp, "a buffer is not aligned to 16 bytes");
    }
  }
  return ffi::Error::Success();
}

static ffi::Error Fp8Quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer sizes,
                              ffi::AnyBuffer seed, ffi::AnyBuffer list,
                              ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                              ffi::Result<ffi::AnyBuffer> workspace, Fp8QuantizeAttrs attrs) {
  Fp8QuantizeSm80 args{};
  args.along_rows = attrs.along_rows;
  args.square = attrs.square;
  args.power_of_two = attrs.power_of_two;
  JGG_RETURN_IF_ERROR(BindOperands(x, sizes, seed, list, &args));
  JGG_RETURN_IF_ERROR(BindResults(*codes, *scales, *workspace, &args));
  const int64_t along = args.along_rows ? args.along : 0;
  if (auto reason = rules::Fp8QuantizeProblem(args.matrices * args.rows, args.columns, along)) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchFp8QuantizeSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8Quantize, Fp8Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // sizes, or empty
                           .Arg<ffi::AnyBuffer>()  // seed, or empty
                           .Arg<ffi::AnyBuffer>()  // list, or empty
                           .Ret<ffi::AnyBuffer>()  // codes
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // workspace
                           .Attrs<Fp8QuantizeAttrs>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8Quantize(XLA_FFI_CallFrame* call_frame) { return kFp8Quantize(call_frame); }

}  // namespace jgg

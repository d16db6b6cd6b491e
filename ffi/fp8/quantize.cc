// CUDA handler of fp8_quantize: bind, check, launch. Attributes say which codes are asked for.

#include "common/cuda_error.h"
#include "fp8/attributes.h"
#include "fp8/codes_bind.h"
#include "fp8/matrices_bind.h"
#include "fp8/quantize_sm80.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_quantize";

static ffi::Error BindOperands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& sizes,
                               const ffi::AnyBuffer& list, const Fp8QuantizeAttrs& attrs,
                               Fp8QuantizeSm80* args) {
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "x", x.element_type()));
  args->dtype = *ToDType(x.element_type());
  JGG_RETURN_IF_ERROR(BindMatrices(kOp, x, args));
  JGG_RETURN_IF_ERROR(BindRows(kOp, sizes, list, args));
  if (args->list != nullptr) {
    if (args->matrices != 1 || attrs.along_columns || attrs.square) {
      return InvalidArgument(kOp, "a list is of one matrix, with blocks of 128 along its rows");
    }
    args->x_lines = args->rows;
    args->rows = list.dimensions()[0];
    JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->rows}));
  }
  args->along = args->rows;
  if (args->sizes == nullptr) return ffi::Error::Success();
  if (args->matrices != 1 || attrs.square) {
    return InvalidArgument(kOp, "sizes do not go with blocks of 128 x 128 or several matrices");
  }
  args->groups = sizes.dimensions()[0];
  args->along = Fp8PaddedRows(args->rows, args->groups);
  return attrs.along_rows ? CheckSmall(kOp, {args->along}) : ffi::Error::Success();
}

// Codes (M, lines, along) and their scales, results `at` and the one behind it.
static ffi::Error BindCodes(ffi::RemainingRets results, size_t at, int64_t lines, int64_t along,
                            Fp8QuantizeSm80* args, Fp8Codes* to) {
  auto first = results.get<ffi::AnyBuffer>(at), second = results.get<ffi::AnyBuffer>(at + 1);
  if (!first) return first.error();
  if (!second) return second.error();
  const ffi::AnyBuffer codes = **first, scales = **second;
  if (codes.element_type() == ffi::F8E5M2) {
    args->e5m2 = true;
  } else {
    JGG_RETURN_IF_ERROR(
        CheckDtype(kOp, "codes", codes, ffi::F8E4M3FN, "float8_e4m3fn or float8_e5m2"));
  }
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "codes", "(M, lines, elements)", codes, {args->matrices, lines, along}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(
      kOp, "scales", "(M, blocks of lines, blocks)", scales,
      {args->matrices, args->square ? (lines + 127) / 128 : lines, (along + 127) / 128}));
  to->codes = codes.untyped_data();
  to->scales = static_cast<float*>(scales.untyped_data());
  return CheckAligned(kOp, {to->codes});
}

static ffi::Error BindResults(ffi::RemainingRets results, const Fp8QuantizeAttrs& attrs,
                              Fp8QuantizeSm80* args) {
  const size_t of_codes = 2 * (size_t{attrs.along_columns} + size_t{attrs.along_rows});
  if (of_codes == 0 || results.size() != of_codes + 1) {
    return InvalidArgument(kOp, "has ", results.size(),
                           " results, expected codes and scales of each way, and a workspace");
  }
  if (attrs.along_columns) {
    JGG_RETURN_IF_ERROR(BindCodes(results, 0, args->rows, args->columns, args, &args->by_rows));
  }
  if (attrs.along_rows) {
    JGG_RETURN_IF_ERROR(
        BindCodes(results, of_codes - 2, args->columns, args->along, args, &args->by_columns));
  }
  return BindWorkspace(kOp, results, of_codes, args);
}

// Why no kernel takes the call.
static rules::Reason Problem(const Fp8QuantizeSm80& args) {
  const int64_t rows = args.matrices * args.rows, along = args.along_rows() ? args.along : 0;
  if (auto reason = rules::Fp8QuantizeProblem(rows, args.columns, along)) return reason;
  if (!args.both()) return std::nullopt;
  if (args.e5m2 || args.power_of_two || args.by_rows.seed != nullptr) {
    return "codes along both axes are e4m3, rounded to nearest, and scales any float32";
  }
  if (!args.square && (args.dtype != DType::kBF16 || args.sizes == nullptr)) {
    return "blocks of 128 along both axes need bfloat16 and groups";
  }
  return rules::Fp8QuantizeProblem(rows, args.columns, args.columns);
}

static ffi::Error Fp8Quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer sizes,
                              ffi::AnyBuffer seed, ffi::AnyBuffer list, ffi::RemainingRets results,
                              Fp8QuantizeAttrs attrs) {
  Fp8QuantizeSm80 args{};
  args.square = attrs.square;
  args.power_of_two = attrs.power_of_two;
  JGG_RETURN_IF_ERROR(BindOperands(x, sizes, list, attrs, &args));
  JGG_RETURN_IF_ERROR(BindSeed(kOp, seed, &args.by_rows));
  args.by_columns.seed = args.by_rows.seed;
  JGG_RETURN_IF_ERROR(BindResults(results, attrs, &args));
  if (auto reason = Problem(args)) return Unimplemented(kOp, *reason);
  return FromCuda(kOp, LaunchFp8QuantizeSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8Quantize, Fp8Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // sizes, or empty
                           .Arg<ffi::AnyBuffer>()  // seed, or empty
                           .Arg<ffi::AnyBuffer>()  // list, or empty
                           .RemainingRets()        // codes and scales, once or twice; workspace
                           .Attrs<Fp8QuantizeAttrs>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8Quantize(XLA_FFI_CallFrame* call_frame) { return kFp8Quantize(call_frame); }

}  // namespace jgg

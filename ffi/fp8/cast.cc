// CUDA handler of fp8_cast: bind, check, launch. Attributes say what is asked for.

#include "common/cuda_error.h"
#include "fp8/attributes.h"
#include "fp8/cast_sm80.h"
#include "fp8/matrices_bind.h"
#include "fp8/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_cast";

static ffi::Error BindOperands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& scales,
                               const ffi::AnyBuffer& sizes, const ffi::AnyBuffer& list,
                               const ffi::AnyBuffer& wanted, const Fp8CastAttrs& attrs,
                               Fp8CastSm80* args) {
  args->of_codes = x.element_type() == ffi::F8E4M3FN || x.element_type() == ffi::F8E5M2;
  args->e5m2 = x.element_type() == ffi::F8E5M2;
  if (!args->of_codes) {
    JGG_RETURN_IF_ERROR(CheckFloat(kOp, "x", x.element_type()));
    args->dtype = *ToDType(x.element_type());
  }
  JGG_RETURN_IF_ERROR(BindMatrices(kOp, x, args));
  const bool has_codes = attrs.along_columns || attrs.along_rows;
  const bool has_scales = has_codes && !args->of_codes;
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "scales", scales, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "scales", has_scales ? "(M,)" : "(0,)", scales,
                                 {has_scales ? args->matrices : 0}));
  if (args->of_codes && (args->matrices != 1 || attrs.largest)) {
    return InvalidArgument(kOp, "codes are of one matrix, and have no magnitudes");
  }
  args->scales = static_cast<const float*>(scales.untyped_data());
  JGG_RETURN_IF_ERROR(BindRows(kOp, sizes, list, args));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "wanted", "(1,) or (0,)", wanted, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "wanted", wanted, ffi::S32, "int32"));
  if (wanted.element_count() > (has_codes ? 0 : 1)) {
    return InvalidArgument(kOp, "wanted is one number, where there are no codes");
  }
  args->wanted = DataOrNull<int32_t>(wanted);
  if ((args->list != nullptr || args->sizes != nullptr) && args->matrices != 1) {
    return InvalidArgument(kOp, "sizes and a list are of one matrix");
  }
  if (args->list != nullptr) {
    if (!has_codes) return InvalidArgument(kOp, "a list says which rows have codes");
    args->x_lines = args->rows;
    args->rows = list.dimensions()[0];
  }
  args->along = args->rows;
  if (args->sizes != nullptr) {
    args->groups = sizes.dimensions()[0];
    args->along = Fp8PaddedRows(args->rows, args->groups);
  }
  return CheckSmall(kOp, {args->rows, args->along});
}

// Codes (M, lines, elements).
static ffi::Error BindCodes(ffi::RemainingRets results, size_t at, int64_t lines, int64_t elements,
                            Fp8CastSm80* args, void** to) {
  auto found = results.get<ffi::AnyBuffer>(at);
  if (!found) return found.error();
  const ffi::AnyBuffer codes = **found;
  const bool e5m2 = codes.element_type() == ffi::F8E5M2;
  if (args->of_codes && e5m2 != args->e5m2) {
    return InvalidArgument(kOp, "codes have the format of x");
  }
  args->e5m2 = e5m2;
  if (!e5m2) {
    JGG_RETURN_IF_ERROR(
        CheckDtype(kOp, "codes", codes, ffi::F8E4M3FN, "float8_e4m3fn or float8_e5m2"));
  }
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "codes", "(M, lines, elements)", codes, {args->matrices, lines, elements}));
  *to = codes.untyped_data();
  return CheckAligned(kOp, {*to});
}

static ffi::Error BindResults(ffi::RemainingRets results, const Fp8CastAttrs& attrs,
                              Fp8CastSm80* args) {
  const size_t count =
      size_t{attrs.along_columns} + size_t{attrs.along_rows} + size_t{attrs.largest} + 1;
  if (count == 1 || results.size() != count) {
    return InvalidArgument(kOp, "has ", results.size(),
                           " results, expected what attributes ask for, and a workspace");
  }
  size_t at = 0;
  if (attrs.along_columns) {
    JGG_RETURN_IF_ERROR(BindCodes(results, at++, args->rows, args->columns, args, &args->codes));
  }
  if (attrs.along_rows) {
    JGG_RETURN_IF_ERROR(BindCodes(results, at++, args->columns, args->along, args, &args->turned));
  }
  if (attrs.largest) {
    auto largest = results.get<ffi::AnyBuffer>(at++);
    if (!largest) return largest.error();
    JGG_RETURN_IF_ERROR(CheckDtype(kOp, "largest", **largest, ffi::U32, "uint32"));
    const int64_t parts = args->has_codes() ? args->blocks() : -1;
    JGG_RETURN_IF_ERROR(
        CheckShape(kOp, "largest", "(M, parts, 2)", **largest, {args->matrices, parts, 2}));
    args->parts = (*largest)->dimensions()[1];
    args->largest = (*largest)->untyped_data();
  }
  return BindWorkspace(kOp, results, at, args);
}

static ffi::Error Fp8Cast(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scales,
                          ffi::AnyBuffer sizes, ffi::AnyBuffer list, ffi::AnyBuffer wanted,
                          ffi::RemainingRets results, Fp8CastAttrs attrs) {
  Fp8CastSm80 args{};
  JGG_RETURN_IF_ERROR(BindOperands(x, scales, sizes, list, wanted, attrs, &args));
  JGG_RETURN_IF_ERROR(BindResults(results, attrs, &args));
  const int64_t along = args.turned != nullptr ? args.along : 0;
  if (auto reason = rules::Fp8CastProblem(args.columns, along)) return Unimplemented(kOp, *reason);
  return FromCuda(kOp, LaunchFp8CastSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kFp8Cast, Fp8Cast,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // scales, or empty
                           .Arg<ffi::AnyBuffer>()  // sizes, or empty
                           .Arg<ffi::AnyBuffer>()  // list, or empty
                           .Arg<ffi::AnyBuffer>()  // wanted, or empty
                           .RemainingRets()  // codes either way, largest magnitudes; workspace
                           .Attrs<Fp8CastAttrs>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8Cast(XLA_FFI_CallFrame* call_frame) { return kFp8Cast(call_frame); }

}  // namespace jgg

// CUDA handler of products of low rank: bind, check, launch.
#include "common/arch.h"
#include "common/attributes.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "grouped_mm/lora_bind.h"
#include "grouped_mm/lora_sm80.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/rules.h"
#include "handlers.h"

// "lora_mm": which optional operands are there, and whether factors are stored the other way.
// Beside it is a factor of all rows.
JGG_ATTRIBUTES(LoraAttrs,             //
               (bool, row_of),        //
               (bool, row_scale),     //
               (bool, existing_out),  //
               (bool, turned));

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "lora_mm";

static const char* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<const char*>(buffer.untyped_data());
}

// The next operand, one number for each row.
template <typename T>
static ffi::Error TakePerRow(Operands* operands, const char* name, ffi::DataType dtype,
                             const char* dtype_name, int64_t rows, const T** to) {
  const auto buffer = operands->Take(name);
  if (!buffer) return buffer.error();
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, name, *buffer, dtype, dtype_name));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, name, "(T,)", *buffer, {rows}));
  *to = static_cast<const T*>(buffer->untyped_data());
  return ffi::Error::Success();
}

static ffi::Error LoraHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer a,
                              ffi::AnyBuffer b, ffi::AnyBuffer pair_of, ffi::RemainingArgs rest,
                              ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets more,
                              LoraAttrs attrs, float scale) {
  const ffi::DataType dtype = x.element_type();
  if (dtype != ffi::BF16 && dtype != ffi::F16) {
    return InvalidArgument(kOp, "x must be bfloat16 or float16");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "a", "(P, R, K)", a, {-1, -1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "b", "(P, N, R)", b, {-1, -1, -1}));
  const int lines = attrs.turned ? 2 : 1;  // the axis of R in a, and of N in b
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  const int64_t pairs = a.dimensions()[0], rank = a.dimensions()[lines];
  const int64_t n = b.dimensions()[lines];
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {rows, k, n, pairs}));
  if (auto reason = rules::LoraProblem(rank, k, n)) return Unimplemented(kOp, *reason);
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "x", "(T, K)", x, dtype, {rows, k}));
  if (attrs.turned) {
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "a", "(P, K, R)", a, dtype, {pairs, k, rank}));
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "b", "(P, R, N)", b, dtype, {pairs, rank, n}));
  } else {
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "a", "(P, R, K)", a, dtype, {pairs, rank, k}));
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "b", "(P, N, R)", b, dtype, {pairs, n, rank}));
  }
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "out", "(T, N)", *out, dtype, {rows, n}));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "pair_of", pair_of, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "pair_of", "(T,)", pair_of, {rows}));
  Lora lora{};
  Operands operands(kOp, rest);
  if (attrs.row_of) {
    JGG_RETURN_IF_ERROR(TakePerRow(&operands, "row_of", ffi::S32, "int32", rows, &lora.row_of));
  }
  if (attrs.row_scale) {
    JGG_RETURN_IF_ERROR(
        TakePerRow(&operands, "row_scale", ffi::F32, "float32", rows, &lora.row_scale));
  }
  if (attrs.existing_out) {
    const auto existing = operands.Take("existing_out");
    if (!existing) return existing.error();
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "existing_out", "(T, N)", *existing, dtype, {rows, n}));
    lora.existing = Data(*existing);
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (more.size() > 1) return InvalidArgument(kOp, "has ", more.size() + 1, " results");
  if (more.size() == 1) {
    auto h = more.get<ffi::AnyBuffer>(0);
    if (!h) return h.error();
    JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "h", "(T, R)", **h, dtype, {rows, rank}));
    lora.h = static_cast<char*>((*h)->untyped_data());
  }
  lora.x = Data(x);
  lora.a = Data(a);
  lora.b = Data(b);
  lora.pair_of = static_cast<const int32_t*>(pair_of.untyped_data());
  lora.out = static_cast<char*>(out->untyped_data());
  lora.rows = static_cast<int>(rows);
  lora.k = static_cast<int>(k);
  lora.n = static_cast<int>(n);
  lora.rank = static_cast<int>(rank);
  lora.pairs = static_cast<int>(pairs);
  lora.scale = scale;
  lora.turned = attrs.turned;
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchLoraSm80(stream, *ToDType(dtype), lora));
}

XLA_FFI_DEFINE_HANDLER(kLoraMm, LoraHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // a
                           .Arg<ffi::AnyBuffer>()  // b
                           .Arg<ffi::AnyBuffer>()  // pair_of
                           .RemainingArgs()        // row_of, row_scale, existing_out
                           .Ret<ffi::AnyBuffer>()  // out
                           .RemainingRets()        // h
                           .Attr<LoraAttrs>("lora_mm")
                           .Attr<float>("scale"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggLoraMm(XLA_FFI_CallFrame* call_frame) { return kLoraMm(call_frame); }

}  // namespace jgg

// CUDA handler of combine: bind, check, launch.
#include "moe/rows_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Combine(cudaStream_t stream, ffi::AnyBuffer rows, ffi::AnyBuffer order,
                          ffi::AnyBuffer place, ffi::RemainingArgs rest,
                          ffi::Result<ffi::AnyBuffer> out) {
  constexpr const char* op = "moe_combine";
  JGG_RETURN_IF_ERROR(CheckSameOrFloat32(op, "the result", *out, rows));
  CombineArgs args{};
  args.dtype = *ToDType(rows.element_type());
  args.out_dtype = *ToDType(out->element_type());
  JGG_RETURN_IF_ERROR(BindPairRows(op, order, place, *out, rows, Size(args.dtype), &args.pairs));
  JGG_RETURN_IF_ERROR(BindOptionalWeight(op, rest, args.pairs, &args.weight));
  args.rows = rows.untyped_data();
  args.out = out->untyped_data();
  return FromCuda(op, combine_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kCombine, Combine, RowsBinding(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeCombine(XLA_FFI_CallFrame* call_frame) { return kCombine(call_frame); }

}  // namespace jgg

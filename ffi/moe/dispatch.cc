// CUDA handler of dispatch: bind, check, launch.
#include "moe/rows_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Dispatch(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer order,
                           ffi::AnyBuffer place, ffi::RemainingArgs rest,
                           ffi::Result<ffi::AnyBuffer> out, bool clears_rest) {
  constexpr const char* op = "moe_dispatch";
  const auto type = x.element_type();
  const bool codes = type == ffi::F8E4M3FN || type == ffi::F8E5M2;  // they have no weights
  if (!codes) JGG_RETURN_IF_ERROR(CheckFloat(op, "x", type));
  if (out->element_type() != type) {
    return InvalidArgument(op, "x and the result must have one dtype");
  }
  DispatchArgs args{};
  args.clears_rest = clears_rest;
  if (!codes) args.dtype = *ToDType(type);
  JGG_RETURN_IF_ERROR(
      BindPairRows(op, order, place, x, *out, codes ? 1 : Size(args.dtype), &args.pairs));
  JGG_RETURN_IF_ERROR(BindOptionalWeight(op, rest, args.pairs, &args.weight));
  if (codes && args.weight) return InvalidArgument(op, "weights need rows of 16 or 32 bits");
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  return FromCuda(op, dispatch_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kDispatch, Dispatch, RowsBinding().Attr<bool>("clears_rest"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeDispatch(XLA_FFI_CallFrame* call_frame) { return kDispatch(call_frame); }

}  // namespace jgg

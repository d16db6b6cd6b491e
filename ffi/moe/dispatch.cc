// CUDA handler of dispatch: bind, check, launch.
#include "moe/rows_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Dispatch(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer order,
                           ffi::AnyBuffer place, ffi::RemainingArgs rest,
                           ffi::Result<ffi::AnyBuffer> out, bool clears_rest) {
  constexpr const char* op = "moe_dispatch";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  if (out->element_type() != x.element_type()) {
    return InvalidArgument(op, "x and the result must have one dtype");
  }
  DispatchArgs args{};
  args.clears_rest = clears_rest;
  args.dtype = *ToDType(x.element_type());
  JGG_RETURN_IF_ERROR(BindPairRows(op, order, place, x, *out, args.dtype, &args.pairs));
  JGG_RETURN_IF_ERROR(BindOptionalWeight(op, rest, args.pairs, &args.weight));
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  return FromCuda(op, dispatch_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kDispatch, Dispatch, RowsBinding().Attr<bool>("clears_rest"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeDispatch(XLA_FFI_CallFrame* call_frame) { return kDispatch(call_frame); }

}  // namespace jgg

// CUDA handler of the backward pass of combine: bind, check, launch.
#include "moe/rows_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error CombineBackward(cudaStream_t stream, ffi::AnyBuffer ct, ffi::AnyBuffer rows,
                                  ffi::AnyBuffer order, ffi::AnyBuffer place, ffi::AnyBuffer weight,
                                  ffi::Result<ffi::AnyBuffer> drows,
                                  ffi::Result<ffi::AnyBuffer> dweight) {
  constexpr const char* op = "moe_combine_backward";
  JGG_RETURN_IF_ERROR(CheckSameOrFloat32(op, "the cotangent", ct, rows));
  CombineBackwardArgs args{};
  args.dtype = *ToDType(rows.element_type());
  args.ct_dtype = *ToDType(ct.element_type());
  JGG_RETURN_IF_ERROR(BindPairRows(op, order, place, ct, rows, Size(args.dtype), &args.pairs));
  JGG_RETURN_IF_ERROR(BindWeight(op, weight, args.pairs, &args.weight));
  const float* placed = nullptr;
  JGG_RETURN_IF_ERROR(BindWeight(op, *dweight, args.pairs, &placed));
  const auto shape = rows.dimensions();
  JGG_RETURN_IF_ERROR(CheckShape(op, "the rows' result", "(R, D)", *drows, {shape[0], shape[1]}));
  if (drows->element_type() != rows.element_type()) {
    return InvalidArgument(op, "rows and their result must have one dtype");
  }
  args.ct = ct.untyped_data();
  args.rows = rows.untyped_data();
  args.drows = drows->untyped_data();
  args.dweight = static_cast<float*>(dweight->untyped_data());
  return FromCuda(op, combine_backward_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kCombineBackward, CombineBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // ct
                           .Arg<ffi::AnyBuffer>()   // rows
                           .Arg<ffi::AnyBuffer>()   // order
                           .Arg<ffi::AnyBuffer>()   // place
                           .Arg<ffi::AnyBuffer>()   // expert_weight
                           .Ret<ffi::AnyBuffer>()   // of rows
                           .Ret<ffi::AnyBuffer>(),  // of expert_weight
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeCombineBackward(XLA_FFI_CallFrame* call_frame) {
  return kCombineBackward(call_frame);
}

}  // namespace jgg

// CUDA handler of top_k: bind, check, launch.
#include <cstdint>
#include <string_view>

#include "common/arch.h"
#include "common/attributes.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"
#include "handlers.h"
#include "moe/rules.h"
#include "moe/top_k_sm80.h"

// "top_k": how the kernel chooses experts, and which weights they get.
JGG_ATTRIBUTES(TopKAttrs,            //
               (bool, bias),         // there is one
               (bool, sigmoid),      // scores are sigmoids of logits, or their softmax
               (bool, renormalize),  //
               (float, scale),       //
               (int32_t, groups),    //
               (int32_t, top_groups));

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error TopK(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                       ffi::Result<ffi::Buffer<ffi::S32>> expert,
                       ffi::Result<ffi::Buffer<ffi::F32>> weight, TopKAttrs attrs) {
  constexpr const char* op = "moe_top_k";
  const bool bfloat16 = logits.element_type() == ffi::BF16;
  if (!bfloat16) JGG_RETURN_IF_ERROR(CheckDtype(op, "logits", logits, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "logits", "(T, E)", logits, {-1, -1}));
  const int64_t tokens = logits.dimensions()[0], experts = logits.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert", "(T, k)", *expert, {tokens, -1}));
  const int64_t k = expert->dimensions()[1], groups = attrs.groups;
  JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(T, k)", *weight, {tokens, k}));
  JGG_RETURN_IF_ERROR(CheckSmall(op, {tokens}, 0));
  if (auto reason = rules::MoeTopKProblem(experts, k, groups)) return Unimplemented(op, *reason);
  const bool fits = groups >= 1 && attrs.top_groups >= 1 && attrs.top_groups <= groups &&
                    experts % groups == 0 && k <= experts / groups * attrs.top_groups;
  if (!fits) {
    return InvalidArgument(op, "cannot choose ", k, " of ", experts, " experts in ",
                           attrs.top_groups, " of ", groups, " groups");
  }
  Operands operands(op, rest);
  const float* bias = nullptr;
  if (attrs.bias) {
    const auto buffer = operands.Take("bias");
    if (!buffer) return buffer.error();
    JGG_RETURN_IF_ERROR(CheckPerGroup(op, "bias", *buffer, experts, ffi::F32, "float32"));
    bias = static_cast<const float*>(buffer->untyped_data());
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  if (tokens == 0 || k == 0) return ffi::Error::Success();
  const TopKArgs args{logits.untyped_data(),
                      bias,
                      expert->typed_data(),
                      weight->typed_data(),
                      static_cast<int32_t>(tokens),
                      static_cast<int32_t>(experts),
                      static_cast<int32_t>(k),
                      attrs.groups,
                      attrs.top_groups,
                      attrs.scale,
                      bfloat16,
                      attrs.sigmoid,
                      attrs.renormalize};
  return FromCuda(op, top_k_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kTopK, TopK,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()         // logits
                           .RemainingArgs()               // bias
                           .Ret<ffi::Buffer<ffi::S32>>()  // expert
                           .Ret<ffi::Buffer<ffi::F32>>()  // weight
                           .Attr<TopKAttrs>("top_k"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeTopK(XLA_FFI_CallFrame* call_frame) { return kTopK(call_frame); }

}  // namespace jgg

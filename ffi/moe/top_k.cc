// CUDA handler of top_k: bind, check, launch.
#include <cstdint>

#include "common/arch.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "moe/top_k_bind.h"
#include "moe/top_k_sm80.h"

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
  Operands operands(op, rest);
  TopKArgs args{};
  JGG_RETURN_IF_ERROR(BindTopK(op, attrs, tokens, experts, expert, weight, &operands, &args));
  JGG_RETURN_IF_ERROR(operands.End());
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  if (tokens == 0 || args.k == 0) return ffi::Error::Success();
  args.logits = logits.untyped_data();
  args.bfloat16 = bfloat16;
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

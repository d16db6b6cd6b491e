// CUDA handler of a router of few tokens: bind, check, launch.
#include <cstdint>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/cuda_error.h"
#include "grouped_mm/gemm_sm90.h"
#include "handlers.h"
#include "moe/router_sm90.h"
#include "moe/top_k_bind.h"

// "router": how w is stored, and whether logits have a bias.
JGG_ATTRIBUTES(RouterAttrs,          //
               (bool, transpose_w),  // w is (E, D)
               (bool, logit_bias));

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Router(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::RemainingArgs rest, ffi::Result<ffi::Buffer<ffi::S32>> expert,
                         ffi::Result<ffi::Buffer<ffi::F32>> weight,
                         ffi::Result<ffi::Buffer<ffi::F32>> logits, RouterAttrs attrs,
                         TopKAttrs choice) {
  constexpr const char* op = "moe_router";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  const bool bfloat16 = w.element_type() == ffi::BF16;
  if (!bfloat16) JGG_RETURN_IF_ERROR(CheckDtype(op, "w", w, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, D)", x, {-1, -1}));
  const int64_t tokens = x.dimensions()[0], d = x.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "logits", "(T, E)", *logits, {tokens, -1}));
  const int64_t experts = logits->dimensions()[1];
  if (attrs.transpose_w) {
    JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(E, D)", w, {experts, d}));
  } else {
    JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(D, E)", w, {d, experts}));
  }
  JGG_RETURN_IF_ERROR(CheckSmall(op, {d}));
  RouterArgs args{};
  Operands operands(op, rest);
  if (attrs.logit_bias) {
    const auto bias = operands.Take("logit_bias");
    if (!bias) return bias.error();
    JGG_RETURN_IF_ERROR(CheckPerGroup(op, "logit_bias", *bias, experts, ffi::F32, "float32"));
    args.logit_bias = static_cast<const float*>(bias->untyped_data());
  }
  JGG_RETURN_IF_ERROR(
      BindTopK(op, choice, tokens, experts, expert, weight, &operands, &args.choice));
  JGG_RETURN_IF_ERROR(operands.End());
  const int64_t k = args.choice.k;
  if (auto reason = rules::MoeRouterProblem(tokens, d, experts, k, choice.groups)) {
    return Unimplemented(op, *reason);
  }
  if (const char* problem = GemmSm90Problem(DType::kBF16, ComputeCapability())) {
    return Unimplemented(op, problem);
  }
  for (const void* data : {x.untyped_data(), w.untyped_data()}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return Unimplemented(op, "x or w is not 16-byte aligned");
    }
  }
  if (tokens == 0) return ffi::Error::Success();
  args.x = x.untyped_data();
  args.w = w.untyped_data();
  args.logits = logits->typed_data();
  args.d = static_cast<int32_t>(d);
  args.x_dtype = *ToDType(x.element_type());
#ifdef JGG_SM90
  return FromCuda(op, LaunchRouterSm90(stream, args, bfloat16, attrs.transpose_w));
#endif
  return FromCuda(op, cudaErrorNoKernelImageForDevice);
}

XLA_FFI_DEFINE_HANDLER(kRouter, Router,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()         // x
                           .Arg<ffi::AnyBuffer>()         // w
                           .RemainingArgs()               // logit_bias, bias
                           .Ret<ffi::Buffer<ffi::S32>>()  // expert
                           .Ret<ffi::Buffer<ffi::F32>>()  // weight
                           .Ret<ffi::Buffer<ffi::F32>>()  // logits
                           .Attr<RouterAttrs>("router")
                           .Attr<TopKAttrs>("top_k"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeRouter(XLA_FFI_CallFrame* call_frame) { return kRouter(call_frame); }

}  // namespace jgg

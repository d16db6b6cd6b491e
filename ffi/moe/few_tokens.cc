// CUDA handler of a few tokens' experts with weights in layout "sm90": bind, check, launch.
#include <algorithm>

#include "common/cuda_error.h"
#include "handlers.h"
#include "moe/experts_bind.h"
#include "moe/few_tokens_bind.h"
#include "moe/few_tokens_sm90.h"
#include "moe/rules.h"

// "few_tokens": the activation between the products, and which optional operands are there.
JGG_ATTRIBUTES(FewTokensAttrs,                  //
               (std::string_view, activation),  //
               (bool, up_bias),                 //
               (bool, down_bias),               //
               (bool, expert_offset));

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "moe_few_tokens";

static ffi::Error BindFewTokensOptions(const QuantizedAttrs& attrs, bool bias, int64_t experts,
                                       int64_t n, Operands* operands, FewTokensWeight* w) {
  if (attrs.global_scale) {
    JGG_RETURN_IF_ERROR(BindGlobalScale(kOp, experts, n, operands, &w->global_scale));
  }
  return bias ? BindFewBias(kOp, operands, experts, n, w) : ffi::Error::Success();
}

static ffi::Error FewTokensHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer up,
                                   ffi::AnyBuffer up_scales, ffi::AnyBuffer down,
                                   ffi::AnyBuffer down_scales, ffi::AnyBuffer index,
                                   ffi::AnyBuffer weight, ffi::RemainingArgs rest,
                                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> a,
                                   ffi::Result<ffi::AnyBuffer> terms, QuantizedAttrs up_attrs,
                                   QuantizedAttrs down_attrs, FewTokensAttrs attrs) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "x", x, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "a", *a, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "up", "(E, N/64, K/64, words)", up, {-1, -1, -1, -1}));
  const int64_t experts = up.dimensions()[0];
  FewTokens few{};
  JGG_RETURN_IF_ERROR(
      BindFewTokens(kOp, x, index, weight, *out, *a, experts, attrs.activation, &few));
  const int64_t d = few.d, f = few.f, columns = IsGated(few.activation) ? 2 * f : f;
  const int64_t pairs = int64_t{few.tokens} * few.k;
  if (auto reason = rules::MoeFewTokensProblem(pairs, few.k, std::max(d, f), true)) {
    return Unimplemented(kOp, *reason);
  }
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "terms", *terms, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "terms", "(rows, D)", *terms,
                                 {rules::MoeFewTermRows(pairs, experts, d * f), d}));
  few.terms = static_cast<float*>(terms->untyped_data());
  FewTokensWeight up_bound{}, down_bound{};
  Coding up_coding{}, down_coding{};
  JGG_RETURN_IF_ERROR(BindPackedExperts(kOp, up, up_scales, up_attrs, experts, columns, d,
                                        &up_coding, &up_bound.packed));
  JGG_RETURN_IF_ERROR(BindPackedExperts(kOp, down, down_scales, down_attrs, experts, d, f,
                                        &down_coding, &down_bound.packed));
  up_bound.scales = up_scales.untyped_data();
  down_bound.scales = down_scales.untyped_data();
  Operands operands(kOp, rest);
  if (attrs.expert_offset) {
    JGG_RETURN_IF_ERROR(BindExpertOffset(kOp, &operands, &few));
  }
  JGG_RETURN_IF_ERROR(
      BindFewTokensOptions(up_attrs, attrs.up_bias, experts, columns, &operands, &up_bound));
  JGG_RETURN_IF_ERROR(
      BindFewTokensOptions(down_attrs, attrs.down_bias, experts, d, &operands, &down_bound));
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(CheckPackedGpu(kOp));
  few.w = up_bound;
  JGG_RETURN_IF_ERROR(FromCuda(kOp, LaunchFewUpSm90(stream, few, up_coding)));
  few.w = down_bound;
  return FromCuda(kOp, LaunchFewDownSm90(stream, few, down_coding));
}

XLA_FFI_DEFINE_HANDLER(kFewTokens, FewTokensHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // up
                           .Arg<ffi::AnyBuffer>()  // its scales
                           .Arg<ffi::AnyBuffer>()  // down
                           .Arg<ffi::AnyBuffer>()  // its scales
                           .Arg<ffi::AnyBuffer>()  // expert_index
                           .Arg<ffi::AnyBuffer>()  // expert_weight
                           .RemainingArgs()  // expert_offset, global_scale and bias of up, of down
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // a, for the second kernel
                           .Ret<ffi::AnyBuffer>()  // terms, for the third
                           .Attr<QuantizedAttrs>("up")
                           .Attr<QuantizedAttrs>("down")
                           .Attr<FewTokensAttrs>("few_tokens"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeFewTokens(XLA_FFI_CallFrame* call_frame) { return kFewTokens(call_frame); }

}  // namespace jgg

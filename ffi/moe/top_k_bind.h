// The attributes and operands of a choice of experts, for the handlers of top_k and of router.
#pragma once

#include <cstdint>

#include "common/attributes.h"
#include "common/check.h"
#include "grouped_mm/metadata_bind.h"
#include "moe/rules.h"
#include "moe/top_k.h"

// "top_k": how the kernel chooses experts, and which weights they get.
JGG_ATTRIBUTES(TopKAttrs,            //
               (bool, bias),         // there is one
               (bool, sigmoid),      // scores are sigmoids of logits, or their softmax
               (bool, renormalize),  //
               (float, scale),       //
               (int32_t, groups),    //
               (int32_t, top_groups));

namespace jgg {

// The choice of k of `experts` for each token, but for the logits; its bias is the next operand.
inline xla::ffi::Error BindTopK(const char* op, const TopKAttrs& attrs, int64_t tokens,
                                int64_t experts,
                                xla::ffi::Result<xla::ffi::Buffer<xla::ffi::S32>>& expert,
                                xla::ffi::Result<xla::ffi::Buffer<xla::ffi::F32>>& weight,
                                Operands* operands, TopKArgs* args) {
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
  if (attrs.bias) {
    const auto buffer = operands->Take("bias");
    if (!buffer) return buffer.error();
    JGG_RETURN_IF_ERROR(CheckPerGroup(op, "bias", *buffer, experts, xla::ffi::F32, "float32"));
    args->bias = static_cast<const float*>(buffer->untyped_data());
  }
  args->expert = expert->typed_data();
  args->weight = weight->typed_data();
  args->tokens = static_cast<int32_t>(tokens);
  args->experts = static_cast<int32_t>(experts);
  args->k = static_cast<int32_t>(k);
  args->groups = attrs.groups;
  args->top_groups = attrs.top_groups;
  args->scale = attrs.scale;
  args->sigmoid = attrs.sigmoid;
  args->renormalize = attrs.renormalize;
  return xla::ffi::Error::Success();
}

}  // namespace jgg

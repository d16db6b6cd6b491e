// From XLA's buffers to FewTokens, for the handlers of a few tokens' experts.
#pragma once

#include <string_view>

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/mm_bind.h"
#include "moe/few_tokens.h"

namespace jgg {

// All but the weights, and the operands that may be there.
inline xla::ffi::Error BindFewTokens(const char* op, const xla::ffi::AnyBuffer& x,
                                     const xla::ffi::AnyBuffer& index,
                                     const xla::ffi::AnyBuffer& weight,
                                     const xla::ffi::AnyBuffer& out, const xla::ffi::AnyBuffer& a,
                                     int64_t experts, std::string_view activation, FewTokens* few) {
  namespace ffi = xla::ffi;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "expert_index", index, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "expert_weight", weight, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, D)", x, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert_index", "(T, k)", index, {x.dimensions()[0], -1}));
  const int64_t tokens = x.dimensions()[0], d = x.dimensions()[1], k = index.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert_weight", "(T, k)", weight, {tokens, k}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(T, D)", out, {tokens, d}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "a", "(T * k, F)", a, {tokens * k, -1}));
  const int64_t f = a.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {tokens, k, experts, d, f}));
  const auto known = ToActivation(activation);
  if (!known || *known == Activation::kNone) {
    return InvalidArgument(op, "unknown activation '", activation, "'");
  }
  for (const void* data : {x.untyped_data(), a.untyped_data()}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return Unimplemented(op, "x is not 16-byte aligned");
    }
  }
  few->x = static_cast<const char*>(x.untyped_data());
  few->a = static_cast<char*>(a.untyped_data());
  few->out = out.untyped_data();
  few->expert_index = static_cast<const int32_t*>(index.untyped_data());
  few->expert_weight = static_cast<const float*>(weight.untyped_data());
  few->tokens = static_cast<int>(tokens);
  few->k = static_cast<int>(k);
  few->experts = static_cast<int>(experts);
  few->d = static_cast<int>(d);
  few->f = static_cast<int>(f);
  few->out_dtype = *ToDType(out.element_type());
  few->activation = *known;
  return ffi::Error::Success();
}

// The next operand as the first expert that is here.
inline xla::ffi::Error BindExpertOffset(const char* op, Operands* operands, FewTokens* few) {
  const auto offset = operands->Take("expert_offset");
  if (!offset) return offset.error();
  JGG_RETURN_IF_ERROR(CheckDtype(op, "expert_offset", *offset, xla::ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert_offset", "()", *offset, {}));
  few->expert_offset = static_cast<const int32_t*>(offset->untyped_data());
  return xla::ffi::Error::Success();
}

// ... as a bias, (experts, n).
inline xla::ffi::Error BindFewBias(const char* op, Operands* operands, int64_t experts, int64_t n,
                                   FewTokensWeight* w) {
  Epilogue epilogue{};
  JGG_RETURN_IF_ERROR(BindBias(op, operands, experts, n, &epilogue));
  w->bias = epilogue.bias;
  w->bias_dtype = epilogue.bias_dtype;
  return xla::ffi::Error::Success();
}

}  // namespace jgg

// From XLA's buffers to PairRows, for the handlers of dispatch and combine.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "moe/rows_sm80.h"
#include "moe/rules.h"

namespace jgg {

// `by_token` is (T, D) and `by_row` (R, D); their lines are cut into pieces.
inline xla::ffi::Error BindPairRows(const char* op, const xla::ffi::AnyBuffer& order,
                                    const xla::ffi::AnyBuffer& place,
                                    const xla::ffi::AnyBuffer& by_token,
                                    const xla::ffi::AnyBuffer& by_row, int element_bytes,
                                    PairRows* pairs) {
  namespace ffi = xla::ffi;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "order", order, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "place", place, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "order", "(R,)", order, {-1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "place", "(T, k)", place, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "what tokens have", "(T, D)", by_token, {-1, -1}));
  const int64_t rows = order.dimensions()[0], d = by_token.dimensions()[1];
  const int64_t tokens = place.dimensions()[0], k = place.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {rows, tokens, k, d}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "what tokens have", "(T, D)", by_token, {tokens, d}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "what rows have", "(R, D)", by_row, {rows, d}));
  if (auto reason = rules::MoeRowsProblem(tokens * k, d, element_bytes)) {
    return Unimplemented(op, *reason);
  }
  if (rows > tokens * k) {
    return InvalidArgument(op, "has ", rows, " rows for ", tokens * k, " pairs");
  }
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  *pairs = PairRows{static_cast<const int32_t*>(order.untyped_data()),
                    static_cast<const int32_t*>(place.untyped_data()),
                    static_cast<int32_t>(tokens),
                    static_cast<int32_t>(k),
                    static_cast<int32_t>(rows),
                    static_cast<int32_t>(d * element_bytes / 16)};
  for (const void* data : {by_token.untyped_data(), by_row.untyped_data()}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      return InvalidArgument(op, "an operand is not 16-byte aligned");
    }
  }
  return xla::ffi::Error::Success();
}

inline xla::ffi::Error BindWeight(const char* op, const xla::ffi::AnyBuffer& buffer,
                                  const PairRows& pairs, const float** weight) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, "expert_weight", buffer, xla::ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert_weight", "(T, k)", buffer, {pairs.tokens, pairs.k}));
  *weight = static_cast<const float*>(buffer.untyped_data());
  return xla::ffi::Error::Success();
}

// The only operand that may be left out.
inline xla::ffi::Error BindOptionalWeight(const char* op, const xla::ffi::RemainingArgs& rest,
                                          const PairRows& pairs, const float** weight) {
  if (rest.size() > 1) return InvalidArgument(op, "has ", rest.size() - 1, " operands too many");
  if (rest.size() == 0) return xla::ffi::Error::Success();
  auto buffer = rest.get<xla::ffi::AnyBuffer>(0);
  if (!buffer) return buffer.error();
  return BindWeight(op, *buffer, pairs, weight);
}

// The operands and the result of dispatch, and of combine, which is its transpose.
inline auto RowsBinding() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()   // x of dispatch, rows of combine
      .Arg<ffi::AnyBuffer>()   // order
      .Arg<ffi::AnyBuffer>()   // place
      .RemainingArgs()         // expert_weight
      .Ret<ffi::AnyBuffer>();  // out
}

// `other` is the dtype of the tokens' operand: that of rows, or float32.
inline xla::ffi::Error CheckSameOrFloat32(const char* op, const char* name,
                                          const xla::ffi::AnyBuffer& other,
                                          const xla::ffi::AnyBuffer& rows) {
  JGG_RETURN_IF_ERROR(CheckFloat(op, "rows", rows.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, name, other.element_type()));
  if (other.element_type() == rows.element_type() || other.element_type() == xla::ffi::F32) {
    return xla::ffi::Error::Success();
  }
  return InvalidArgument(op, name, " must be float32, or as rows");
}

}  // namespace jgg

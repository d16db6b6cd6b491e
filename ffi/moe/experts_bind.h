// Weights of all experts, for the handlers of few and of some tokens' experts.
#pragma once

#include <string>

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/gemm_sm90.h"
#include "quantized/packed_bind.h"
#include "quantized/qmm_bind.h"

namespace jgg {

// A prepacked weight (E, n, k): its coding and its codes.
inline xla::ffi::Error BindPackedExperts(const char* op, const xla::ffi::AnyBuffer& weight,
                                         const xla::ffi::AnyBuffer& scales,
                                         const QuantizedAttrs& attrs, int64_t experts, int64_t n,
                                         int64_t k, Coding* coding, PackedCodesSm90* packed) {
  QuantizedWeight w{};
  JGG_RETURN_IF_ERROR(BindCoding(op, attrs, "sm90", &w));
  JGG_RETURN_IF_ERROR(BindPacked(op, weight, scales, w, packed));
  if (packed->half_scales) return InvalidArgument(op, "scales must be uint32");
  if (n % 64 != 0 || k % 64 != 0) return InvalidArgument(op, "D and F must be whole 64s");
  *coding = w.coding;
  return CheckShape(op, "weight", "(E, N/64, K/64, 128 * bits)", weight,
                    {experts, n / 64, k / 64, 128 * w.coding.bits});
}

// Prepacked weights are for Hopper.
inline xla::ffi::Error CheckPackedGpu(const char* op) {
  const char* problem = GemmSm90Problem(DType::kBF16, ComputeCapability());
  if (problem == nullptr) return xla::ffi::Error::Success();
  return Unimplemented(op, std::string("a weight of jax_groupgemm.prepack: ") + problem);
}

// x and `up`, if weights are 16-bit floats.
inline xla::ffi::Error CheckDense(const char* op, const xla::ffi::AnyBuffer& x,
                                  const xla::ffi::AnyBuffer& up) {
  if (x.element_type() != xla::ffi::BF16 && x.element_type() != xla::ffi::F16) {
    return InvalidArgument(op, "x must be bfloat16 or float16");
  }
  return CheckShape(op, "up", "(E, any, any)", up, {-1, -1, -1});
}

// A weight (E, k, n), or transposed.
inline xla::ffi::Error CheckDenseExperts(const char* op, const char* name,
                                         const xla::ffi::AnyBuffer& w, int64_t experts, int64_t k,
                                         int64_t n, bool transposed) {
  return CheckShape(op, name, transposed ? "(E, N, K)" : "(E, K, N)", w,
                    {experts, transposed ? n : k, transposed ? k : n});
}

}  // namespace jgg

// Operands of the handlers of FP8 products.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "common/buffer.h"
#include "common/check.h"
#include "fp8/gemm_sm90.h"

namespace jgg {

inline xla::ffi::Error CheckCodes(const char* op, const char* name,
                                  const xla::ffi::AnyBuffer& codes) {
  const auto type = codes.element_type();
  if (type == xla::ffi::F8E4M3FN || type == xla::ffi::U8) return xla::ffi::Error::Success();
  return InvalidArgument(op, name, " has XLA dtype ", static_cast<int>(type),
                         ", expected float8_e4m3fn or uint8");
}

// Those of gradients may be e5m2.
inline xla::ffi::Error CheckEitherCodes(const char* op, const char* name,
                                        const xla::ffi::AnyBuffer& codes, bool* e5m2) {
  *e5m2 = codes.element_type() == xla::ffi::F8E5M2;
  return *e5m2 ? xla::ffi::Error::Success() : CheckCodes(op, name, codes);
}

inline xla::ffi::Error CheckScales(const char* op, const char* name, const char* letters,
                                   const xla::ffi::AnyBuffer& scales,
                                   std::initializer_list<int64_t> shape) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, scales, xla::ffi::F32, "float32"));
  return CheckShape(op, name, letters, scales, shape);
}

// Fast kernels have results in bfloat16 or float32.
inline xla::ffi::Error CheckFastOut(const char* op, DType dtype) {
  if (dtype != DType::kF16) return xla::ffi::Error::Success();
  return InvalidArgument(op, "there is no fast kernel of float16 results");
}

// Codes (..., lines, K) as pairs of them, which TMA copies as it does 16-bit elements.
inline TensorMapSpec DescribePairs(const xla::ffi::AnyBuffer& codes, int64_t lines,
                                   int64_t groups) {
  const int64_t pairs = codes.dimensions().back() / 2;
  return {codes.untyped_data(), DType::kBF16, pairs, lines, groups, pairs, pairs * lines};
}

inline cudaError_t LaunchFp8(cudaStream_t stream, Fp8GemmSm90& fp8, const TensorMapSpec& l,
                             const TensorMapSpec& r, bool rows_first = false) {
#ifdef JGG_SM90
  if (TensorMapProblem(l) != nullptr || TensorMapProblem(r) != nullptr) {
    return cudaErrorNotSupported;
  }
  OperandsSm90 operands{};
  operands.dtype = DType::kBF16;
  operands.planes = 1;
  operands.l_k_major = operands.r_k_major = true;
  operands.l = l;
  operands.r = r;
  return fp8.fast ? LaunchFp8FastGemmSm90(stream, fp8, operands)
                  : LaunchFp8GemmSm90(stream, fp8, operands, rows_first);
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

}  // namespace jgg

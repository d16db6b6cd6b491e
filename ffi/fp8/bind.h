// Operands of the handlers of FP8 products.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "common/buffer.h"
#include "common/check.h"
#include "fp8/gemm_sm90.h"
#include "fp8/rules.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/existing_out.h"
#include "grouped_mm/metadata_bind.h"

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

// Sizes of x (T, K) and w (G, N, K).
struct Fp8MmSizes {
  int64_t rows, k, groups, n;
};

inline xla::ffi::Error BindFp8Mm(const char* op, const xla::ffi::AnyBuffer& x,
                                 const xla::ffi::AnyBuffer& w, Fp8MmSizes* mm) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, K)", x, {-1, -1}));
  mm->rows = x.dimensions()[0];
  mm->k = x.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(G, N, K)", w, {-1, -1, mm->k}));
  mm->groups = w.dimensions()[0];
  mm->n = w.dimensions()[1];
  return xla::ffi::Error::Success();
}

// Scales of 128 k of a row of x, and of blocks of 128 x 128 of w.
inline xla::ffi::Error CheckBlockScales(const char* op, const xla::ffi::AnyBuffer& x_scales,
                                        const xla::ffi::AnyBuffer& w_scales, const Fp8MmSizes& mm) {
  const int64_t blocks = (mm.k + 127) / 128, columns = (mm.n + 127) / 128;
  JGG_RETURN_IF_ERROR(
      CheckScales(op, "x_scales", "(T, ceil(K / 128))", x_scales, {mm.rows, blocks}));
  return CheckScales(op, "w_scales", "(G, ceil(N / 128), ceil(K / 128))", w_scales,
                     {mm.groups, columns, blocks});
}

// Metadata of a product to `rows_out` rows, and its group offset, which alone is among `rest`.
inline xla::ffi::Error BindFp8Metadata(const char* op, const MetadataAttrs& attrs,
                                       const xla::ffi::AnyBuffer& buffer,
                                       xla::ffi::RemainingArgs rest, bool clears_rest,
                                       const Fp8MmSizes& mm, int64_t rows_out, Metadata* metadata) {
  JGG_RETURN_IF_ERROR(BindMetadata(op, attrs, buffer, metadata));
  metadata->clears_rest = clears_rest;
  Operands operands(op, rest);
  if (attrs.group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(op, &operands, metadata));
  JGG_RETURN_IF_ERROR(operands.End());
  return CheckMm(op, *metadata, mm.rows, rows_out, mm.groups, mm.n, mm.k);
}

// Sizes of dy (N, T), x (K, T), and the result (G, N, K). T: padded rows of groups.
struct Fp8WgradSizes {
  int64_t n, k, rows, groups;
};

inline xla::ffi::Error BindFp8Wgrad(const char* op, const xla::ffi::AnyBuffer& dy,
                                    const xla::ffi::AnyBuffer& x, Fp8WgradSizes* wgrad) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "dy", "(N, T)", dy, {-1, -1}));
  wgrad->n = dy.dimensions()[0];
  wgrad->rows = dy.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(K, T)", x, {-1, wgrad->rows}));
  wgrad->k = x.dimensions()[0];
  return xla::ffi::Error::Success();
}

// Scales of 128 rows of a line of dy, and of x.
inline xla::ffi::Error CheckLineScales(const char* op, const xla::ffi::AnyBuffer& dy_scales,
                                       const xla::ffi::AnyBuffer& x_scales,
                                       const Fp8WgradSizes& wgrad) {
  const int64_t blocks = wgrad.rows / 128;
  JGG_RETURN_IF_ERROR(CheckScales(op, "dy_scales", "(N, T / 128)", dy_scales, {wgrad.n, blocks}));
  return CheckScales(op, "x_scales", "(K, T / 128)", x_scales, {wgrad.k, blocks});
}

// The result, groups' rows, or pairs of them, in blocks of 128, and what is added to, which alone
// is among `rest`.
inline xla::ffi::Error BindFp8WgradOut(const char* op, cudaStream_t stream,
                                       const xla::ffi::AnyBuffer& sizes,
                                       xla::ffi::RemainingArgs rest, const xla::ffi::AnyBuffer& out,
                                       bool existing_out, Fp8WgradSizes* wgrad,
                                       Metadata* metadata) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(G, N, K)", out, {-1, wgrad->n, wgrad->k}));
  wgrad->groups = out.dimensions()[0];
  JGG_RETURN_IF_ERROR(BindMetadata(op, {"sizes", false, false}, sizes, metadata));
  if (metadata->count != wgrad->groups) {
    return InvalidArgument(op, "there are ", metadata->count, " groups and ", wgrad->groups,
                           " matrices");
  }
  JGG_RETURN_IF_ERROR(CheckSmall(op, {wgrad->n, wgrad->k, wgrad->rows, wgrad->groups}, 0));
  Operands operands(op, rest);
  if (existing_out) {
    if (out.element_type() != xla::ffi::F32) {
      return InvalidArgument(op, "existing_out needs float32");
    }
    JGG_RETURN_IF_ERROR(BindExistingOut(op, stream, &operands, out));
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (wgrad->rows % 128 != 0) {
    return InvalidArgument(op, "rows are padded to 128, got ", wgrad->rows);
  }
  if (auto reason = rules::Fp8WgradSm90Problem(wgrad->k)) return Unimplemented(op, *reason);
  return xla::ffi::Error::Success();
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

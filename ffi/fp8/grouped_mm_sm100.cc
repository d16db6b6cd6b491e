// CUDA handler of fp8_grouped_mm on Blackwell: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm100.h"
#include "fp8/rules.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/metadata_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_mm_sm100";

static ffi::Error Fp8GroupedMmSm100(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                                    ffi::AnyBuffer w, ffi::AnyBuffer w_scales,
                                    ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                                    ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::BufferR1<ffi::U8>> workspace,
                                    MetadataAttrs metadata_attrs, bool clears_rest) {
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "x", x));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "w", w));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, -1}));
  Fp8GemmSm100 fp8{};
  GemmSm100& gemm = fp8.gemm;
  sm100::Product& product = gemm.product;
  product.rows_x = x.dimensions()[0];
  product.k = x.dimensions()[1];
  product.k_major = true;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "w", "(G, N, K)", w, {-1, -1, product.k}));
  product.weights = w.dimensions()[0];
  product.n = w.dimensions()[1];
  const int64_t blocks = (product.k + 127) / 128, columns = (product.n + 127) / 128;
  JGG_RETURN_IF_ERROR(
      CheckScales(kOp, "x_scales", "(T, ceil(K / 128))", x_scales, {product.rows_x, blocks}));
  JGG_RETURN_IF_ERROR(CheckScales(kOp, "w_scales", "(G, ceil(N / 128), ceil(K / 128))", w_scales,
                                  {product.weights, columns, blocks}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {product.rows_x, product.n}));
  const auto dtype = ToDType(out->element_type());
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return InvalidArgument(kOp, "out must be bfloat16 or float32");
  }
  product.rows_y = product.rows_x;
  product.in_bytes = 1;
  product.out_bytes = Size(*dtype);
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &gemm.metadata));
  gemm.metadata.clears_rest = clears_rest;
  Operands operands(kOp, rest);
  if (metadata_attrs.group_offset) {
    JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &gemm.metadata));
  }
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(CheckMm(kOp, gemm.metadata, product.rows_x, product.rows_y, product.weights,
                              product.n, product.k));
  if (gemm.metadata.kind == MetadataKind::kSegments) return InvalidArgument(kOp, "needs sizes");
  if (auto reason = rules::Fp8MmSm90Problem(product.k, product.n)) {
    return Unimplemented(kOp, *reason);
  }
  gemm.out_dtype = *dtype;
  gemm.a = x.untyped_data();
  gemm.b = w.untyped_data();
  gemm.out = out->untyped_data();
  gemm.workspace = workspace->untyped_data();
  gemm.workspace_bytes = workspace->dimensions()[0];
  fp8.a_scales = static_cast<const float*>(x_scales.untyped_data());
  fp8.b_scales = static_cast<const float*>(w_scales.untyped_data());
  if (auto reason = GemmSm100Problem(gemm, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchFp8GemmSm100(stream, fp8));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedMmSm100, Fp8GroupedMmSm100,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()          // x, codes
                           .Arg<ffi::AnyBuffer>()          // x_scales
                           .Arg<ffi::AnyBuffer>()          // w, codes
                           .Arg<ffi::AnyBuffer>()          // w_scales
                           .Arg<ffi::AnyBuffer>()          // metadata
                           .RemainingArgs()                // group_offset
                           .Ret<ffi::AnyBuffer>()          // out
                           .Ret<ffi::BufferR1<ffi::U8>>()  // workspace
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<bool>("clears_rest"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedMmSm100(XLA_FFI_CallFrame* call_frame) {
  return kFp8GroupedMmSm100(call_frame);
}

}  // namespace jgg

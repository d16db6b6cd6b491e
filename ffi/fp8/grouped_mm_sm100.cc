// CUDA handler of fp8_grouped_mm on Blackwell: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm100.h"
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
  Fp8MmSizes mm{};
  JGG_RETURN_IF_ERROR(BindFp8Mm(kOp, x, w, &mm));
  JGG_RETURN_IF_ERROR(CheckBlockScales(kOp, x_scales, w_scales, mm));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {mm.rows, mm.n}));
  const auto dtype = ToDType(out->element_type());
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return InvalidArgument(kOp, "out must be bfloat16 or float32");
  }
  Fp8GemmSm100 fp8{};
  GemmSm100& gemm = fp8.gemm;
  sm100::Product& product = gemm.product;
  product.rows_x = product.rows_y = mm.rows;
  product.weights = mm.groups;
  product.n = mm.n;
  product.k = mm.k;
  product.k_major = true;
  product.in_bytes = 1;
  product.out_bytes = Size(*dtype);
  JGG_RETURN_IF_ERROR(BindFp8Metadata(kOp, metadata_attrs, metadata, rest, clears_rest, mm, mm.rows,
                                      &gemm.metadata));
  if (gemm.metadata.kind == MetadataKind::kSegments) return InvalidArgument(kOp, "needs sizes");
  if (auto reason = rules::Fp8MmSm90Problem(mm.k, mm.n)) return Unimplemented(kOp, *reason);
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

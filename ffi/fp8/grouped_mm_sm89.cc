// CUDA handler of fp8_grouped_mm by mma.sync: bind, check, launch.
#include "common/alignment.h"
#include "common/arch.h"
#include "common/cuda_error.h"
#include "fp8/bind.h"
#include "fp8/gemm_sm89.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "fp8_grouped_mm_sm89";

static ffi::Error Fp8GroupedMmSm89(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                                   ffi::AnyBuffer w, ffi::AnyBuffer w_scales,
                                   ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                                   ffi::Result<ffi::AnyBuffer> out, MetadataAttrs metadata_attrs,
                                   bool clears_rest) {
  Fp8GemmSm89 fp8{};
  GemmSm80& gemm = fp8.gemm;
  JGG_RETURN_IF_ERROR(CheckEitherCodes(kOp, "x", x, &fp8.e5m2));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "w", w));
  Fp8MmSizes mm{};
  JGG_RETURN_IF_ERROR(BindFp8Mm(kOp, x, w, &mm));
  JGG_RETURN_IF_ERROR(CheckBlockScales(kOp, x_scales, w_scales, mm));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {mm.rows, mm.n}));
  const auto dtype = ToDType(out->element_type());
  if (!dtype) return InvalidArgument(kOp, "out must be bfloat16, float16 or float32");
  JGG_RETURN_IF_ERROR(BindFp8Metadata(kOp, metadata_attrs, metadata, rest, clears_rest, mm, mm.rows,
                                      &gemm.metadata));
  if (gemm.metadata.kind != MetadataKind::kSizes) return InvalidArgument(kOp, "needs sizes");
  if (auto reason = rules::Fp8MmSm90Problem(mm.k, mm.n)) return Unimplemented(kOp, *reason);
  if (auto reason = NeedsComputeCapability(89, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  gemm.rows_x = mm.rows;
  gemm.groups = mm.groups;
  gemm.n = mm.n;
  gemm.out = out->untyped_data();
  gemm.out_dtype = *dtype;
  gemm.out_width = WholeAlignedElements(*dtype, gemm.out, {gemm.n});
  fp8.a_scales = static_cast<const float*>(x_scales.untyped_data());
  fp8.b_scales = static_cast<const float*>(w_scales.untyped_data());
  CompleteMmSm89(fp8, x.untyped_data(), w.untyped_data(), mm.k);
  return FromCuda(kOp, RunFp8GemmSm89(stream, fp8));
}

XLA_FFI_DEFINE_HANDLER(kFp8GroupedMmSm89, Fp8GroupedMmSm89,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x, codes
                           .Arg<ffi::AnyBuffer>()  // x_scales
                           .Arg<ffi::AnyBuffer>()  // w, codes
                           .Arg<ffi::AnyBuffer>()  // w_scales
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // group_offset
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<bool>("clears_rest"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggFp8GroupedMmSm89(XLA_FFI_CallFrame* call_frame) {
  return kFp8GroupedMmSm89(call_frame);
}

}  // namespace jgg

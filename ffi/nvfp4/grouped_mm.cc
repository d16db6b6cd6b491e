// CUDA handler of nvfp4_grouped_mm: bind, launch. Blackwell only.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "nvfp4/bind.h"
#include "nvfp4/grouped_mm_sm100.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error BindOperands(const char* op, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                               ffi::AnyBuffer w, ffi::AnyBuffer w_scales,
                               Nvfp4GroupedMmArgs* args) {
  JGG_RETURN_IF_ERROR(CheckCodes(op, "x", x, 2, "(T, K/8)"));
  JGG_RETURN_IF_ERROR(CheckCodes(op, "w", w, 3, "(G, N, K/8)"));
  args->tokens = x.dimensions()[0];
  args->groups = w.dimensions()[0];
  args->n = w.dimensions()[1];
  args->k = 8 * x.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {args->tokens, args->groups, args->n, args->k}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(G, N, K/8)", w, {-1, -1, args->k / 8}));
  const int64_t blocks = args->k / nvfp4::kScaleElements;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "x_scales", x_scales, ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "w_scales", w_scales, ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "x_scales", "(T, K/16)", x_scales, {args->tokens, blocks}));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "w_scales", "(G, N, K/16)", w_scales, {args->groups, args->n, blocks}));
  args->x = {x.untyped_data(), x_scales.untyped_data()};
  args->w = {w.untyped_data(), w_scales.untyped_data()};
  return ffi::Error::Success();
}

static ffi::Error Nvfp4GroupedMm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                                 ffi::AnyBuffer w, ffi::AnyBuffer w_scales, ffi::AnyBuffer sizes,
                                 ffi::AnyBuffer alpha, ffi::Result<ffi::AnyBuffer> out,
                                 ffi::Result<ffi::BufferR1<ffi::U8>> workspace) {
  constexpr const char* op = "nvfp4_grouped_mm";
  Nvfp4GroupedMmArgs args{};
  JGG_RETURN_IF_ERROR(BindOperands(op, x, x_scales, w, w_scales, &args));
  JGG_RETURN_IF_ERROR(CheckPerGroup(op, "sizes", sizes, args.groups, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckPerGroup(op, "alpha", alpha, args.groups, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(T, N)", *out, {args.tokens, args.n}));
  const auto dtype = ToDType(out->element_type());
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return InvalidArgument(op, "out has XLA dtype ", static_cast<int>(out->element_type()),
                           ", expected bfloat16 or float32");
  }
  args.sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args.alpha = static_cast<const float*>(alpha.untyped_data());
  args.out = out->untyped_data();
  args.out_dtype = *dtype;
  args.workspace = workspace->untyped_data();
  args.workspace_bytes = workspace->dimensions()[0];
  if (auto reason = nvfp4_grouped_mm_sm100_unsupported(args, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return FromCuda(op, nvfp4_grouped_mm_sm100(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kNvfp4GroupedMm, Nvfp4GroupedMm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // x_scales
                           .Arg<ffi::AnyBuffer>()           // w
                           .Arg<ffi::AnyBuffer>()           // w_scales
                           .Arg<ffi::AnyBuffer>()           // sizes
                           .Arg<ffi::AnyBuffer>()           // alpha
                           .Ret<ffi::AnyBuffer>()           // out
                           .Ret<ffi::BufferR1<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggNvfp4GroupedMm(XLA_FFI_CallFrame* call_frame) {
  return kNvfp4GroupedMm(call_frame);
}

}  // namespace jgg

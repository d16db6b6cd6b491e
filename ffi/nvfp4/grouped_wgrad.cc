// CUDA handler of nvfp4_grouped_wgrad: bind, launch. Blackwell only.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/existing_out.h"
#include "handlers.h"
#include "nvfp4/bind.h"
#include "nvfp4/grouped_wgrad_sm100.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "nvfp4_grouped_wgrad";

static ffi::Error BindMatrices(ffi::AnyBuffer x, ffi::AnyBuffer x_scales, ffi::AnyBuffer dy,
                               ffi::AnyBuffer dy_scales, Nvfp4GroupedWgradArgs* args) {
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "x", x, 2, "(K, P/8)"));
  JGG_RETURN_IF_ERROR(CheckCodes(kOp, "dy", dy, 2, "(N, P/8)"));
  args->k = x.dimensions()[0];
  args->n = dy.dimensions()[0];
  args->padded_tokens = 8 * x.dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args->padded_tokens, args->n, args->k}));
  if (args->padded_tokens % nvfp4::kTileK != 0) {
    return InvalidArgument(kOp, "x has shape ", ShapeText(x), ", expected (K, P/8) with P % ",
                           nvfp4::kTileK, " == 0");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "dy", "(N, P/8)", dy, {-1, args->padded_tokens / 8}));
  const int64_t blocks = args->padded_tokens / nvfp4::kScaleElements;
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "x_scales", x_scales, ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "dy_scales", dy_scales, ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x_scales", "(K, P/16)", x_scales, {args->k, blocks}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "dy_scales", "(N, P/16)", dy_scales, {args->n, blocks}));
  args->x = {x.untyped_data(), x_scales.untyped_data()};
  args->dy = {dy.untyped_data(), dy_scales.untyped_data()};
  return ffi::Error::Success();
}

// beta, and the matrices that it multiplies, which lie where the result goes.
static ffi::Error BindExisting(cudaStream_t stream, ffi::RemainingArgs rest, ffi::AnyBuffer out,
                               Nvfp4GroupedWgradArgs* args) {
  if (rest.size() == 0) return ffi::Error::Success();
  Operands operands(kOp, rest);
  const auto beta = operands.Take("beta");
  if (!beta) return beta.error();
  JGG_RETURN_IF_ERROR(CheckPerGroup(kOp, "beta", *beta, args->groups, ffi::F32, "float32"));
  args->beta = static_cast<const float*>(beta->untyped_data());
  JGG_RETURN_IF_ERROR(BindExistingOut(kOp, stream, &operands, out));
  return operands.End();
}

static ffi::Error Nvfp4GroupedWgrad(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scales,
                                    ffi::AnyBuffer dy, ffi::AnyBuffer dy_scales,
                                    ffi::AnyBuffer sizes, ffi::AnyBuffer alpha,
                                    ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::BufferR1<ffi::U8>> workspace, int32_t tokens) {
  Nvfp4GroupedWgradArgs args{};
  JGG_RETURN_IF_ERROR(BindMatrices(x, x_scales, dy, dy_scales, &args));
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "out", *out, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(G, N, K)", *out, {-1, args.n, args.k}));
  args.tokens = tokens;
  args.groups = out->dimensions()[0];
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {args.tokens, args.groups}));
  JGG_RETURN_IF_ERROR(CheckPerGroup(kOp, "sizes", sizes, args.groups, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckPerGroup(kOp, "alpha", alpha, args.groups, ffi::F32, "float32"));
  args.sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args.alpha = static_cast<const float*>(alpha.untyped_data());
  args.out = out->untyped_data();
  JGG_RETURN_IF_ERROR(BindExisting(stream, rest, *out, &args));
  args.workspace = workspace->untyped_data();
  args.workspace_bytes = workspace->dimensions()[0];
  if (auto reason = nvfp4_grouped_wgrad_sm100_unsupported(args, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, nvfp4_grouped_wgrad_sm100(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kNvfp4GroupedWgrad, Nvfp4GroupedWgrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()          // x
                           .Arg<ffi::AnyBuffer>()          // x_scales
                           .Arg<ffi::AnyBuffer>()          // dy
                           .Arg<ffi::AnyBuffer>()          // dy_scales
                           .Arg<ffi::AnyBuffer>()          // sizes
                           .Arg<ffi::AnyBuffer>()          // alpha
                           .RemainingArgs()                // beta, existing_out
                           .Ret<ffi::AnyBuffer>()          // out
                           .Ret<ffi::BufferR1<ffi::U8>>()  // workspace
                           .Attr<int32_t>("tokens"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggNvfp4GroupedWgrad(XLA_FFI_CallFrame* call_frame) {
  return kNvfp4GroupedWgrad(call_frame);
}

}  // namespace jgg

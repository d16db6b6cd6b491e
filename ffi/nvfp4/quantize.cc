// CUDA handler of nvfp4_quantize: bind, launch.

#include <algorithm>

#include "common/cuda_error.h"
#include "handlers.h"
#include "nvfp4/attributes.h"
#include "nvfp4/bind.h"
#include "nvfp4/quantize_sm80.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error BindX(const char* op, const ffi::AnyBuffer& x, Nvfp4QuantizeSm80* args) {
  const auto dtype = ToDType(x.element_type());
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(M, R, C)", x, {-1, -1, -1}));
  args->dtype = *dtype;
  args->x = x.untyped_data();
  args->matrices = x.dimensions()[0];
  args->rows = x.dimensions()[1];
  args->columns = x.dimensions()[2];
  return CheckSmall(op, {args->matrices, args->rows, args->columns});
}

// Checks sizes and seed, which may be empty, and which attributes they allow.
static ffi::Error BindOptions(const char* op, const ffi::AnyBuffer& sizes,
                              const ffi::AnyBuffer& seed, Nvfp4QuantizeSm80* args) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(G,)", sizes, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sizes", sizes, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "seed", "(2,) or (0,)", seed, {-1}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "seed", seed, ffi::U32, "uint32"));
  if (seed.dimensions()[0] != 0 && seed.dimensions()[0] != 2) {
    return InvalidArgument(op, "seed has shape ", ShapeText(seed), ", expected (2,) or (0,)");
  }
  args->sizes = DataOrNull<int32_t>(sizes);
  args->groups = sizes.dimensions()[0];
  args->seed = DataOrNull<uint32_t>(seed);
  if (args->sizes != nullptr && (args->matrices != 1 || args->scale_2d)) {
    return InvalidArgument(op, "sizes do not go with scale_2d or more than one matrix");
  }
  if (args->scale_2d && args->hadamard) {
    return InvalidArgument(op, "scale_2d does not go with hadamard");
  }
  return ffi::Error::Success();
}

static ffi::Error BindResults(const char* op, const ffi::AnyBuffer& weight,
                              const ffi::AnyBuffer& scales, const ffi::AnyBuffer& global_scale,
                              const ffi::AnyBuffer& workspace, Nvfp4QuantizeSm80* args) {
  const int64_t lines = args->along_rows ? args->columns : args->rows;
  const int64_t along = args->along_rows ? args->rows : args->columns;
  JGG_RETURN_IF_ERROR(CheckDtype(op, "scales", scales, ffi::U8, "uint8"));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "scales", "(M, lines, blocks)", scales, {args->matrices, lines, -1}));
  args->blocks = scales.dimensions()[2];
  if (args->along_rows && args->sizes != nullptr) {
    // The numbers that StartsKernel counts fit an int32: the largest of them is `padded`.
    const int64_t padded = args->rows + 63 * std::min(args->groups, args->rows);
    if (args->blocks != padded / 64 * 4 || padded > INT32_MAX) {
      return InvalidArgument(op, "scales have ", args->blocks, " blocks to a line, expected ",
                             padded / 64 * 4, " for ", args->rows, " rows in ", args->groups,
                             " groups");
    }
  } else if (along != 16 * args->blocks) {
    return InvalidArgument(op, "scales have ", args->blocks, " blocks to a line of ", along,
                           " elements, expected 16 elements to a block");
  }
  JGG_RETURN_IF_ERROR(CheckDtype(op, "weight", weight, ffi::U32, "uint32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "weight", "(M, lines, 2*blocks)", weight,
                                 {args->matrices, lines, 2 * args->blocks}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "global_scale", global_scale, ffi::F32, "float32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "global_scale", "(M,)", global_scale, {args->matrices}));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "workspace", workspace, ffi::U32, "uint32"));
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "workspace", "(words,)", workspace, {args->workspace_words()}));
  args->weight = weight.untyped_data();
  args->scales = scales.untyped_data();
  args->global_scale = static_cast<float*>(global_scale.untyped_data());
  args->workspace = workspace.untyped_data();
  return CheckAligned(op, {args->x, args->weight, args->scales, args->workspace});
}

static ffi::Error Nvfp4Quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer sizes,
                                ffi::AnyBuffer seed, ffi::Result<ffi::AnyBuffer> weight,
                                ffi::Result<ffi::AnyBuffer> scales,
                                ffi::Result<ffi::AnyBuffer> global_scale,
                                ffi::Result<ffi::AnyBuffer> workspace, Nvfp4QuantizeAttrs attrs) {
  constexpr const char* op = "nvfp4_quantize";
  Nvfp4QuantizeSm80 args{};
  args.along_rows = attrs.along_rows;
  args.scale_2d = attrs.scale_2d;
  args.hadamard = attrs.hadamard;
  JGG_RETURN_IF_ERROR(BindX(op, x, &args));
  JGG_RETURN_IF_ERROR(BindOptions(op, sizes, seed, &args));
  JGG_RETURN_IF_ERROR(BindResults(op, *weight, *scales, *global_scale, *workspace, &args));
  return FromCuda(op, LaunchNvfp4QuantizeSm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kNvfp4Quantize, Nvfp4Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // sizes, or empty
                           .Arg<ffi::AnyBuffer>()  // seed, or empty
                           .Ret<ffi::AnyBuffer>()  // weight
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // global_scale
                           .Ret<ffi::AnyBuffer>()  // workspace
                           .Attrs<Nvfp4QuantizeAttrs>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggNvfp4Quantize(XLA_FFI_CallFrame* call_frame) {
  return kNvfp4Quantize(call_frame);
}

}  // namespace jgg

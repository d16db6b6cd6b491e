// CUDA handler of qmm with weights in layout "sm90": bind, launch. Hopper only.

#include <string_view>

#include "common/alignment.h"
#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "quantized/gemm_sm90.h"
#include "quantized/qmm_bind.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "qmm_packed";

// The weight: tiles of 64 columns x 64 k.
static ffi::Error BindPacked(ffi::AnyBuffer weight, ffi::AnyBuffer scales, Mode mode,
                             QuantizedGemmSm90* quantized, int* bits) {
  for (const auto& buffer : {weight, scales}) {
    if (buffer.element_type() != ffi::U32) {
      return InvalidArgument(kOp, "weight and scales must be uint32");
    }
  }
  JGG_RETURN_IF_ERROR(
      CheckShape(kOp, "weight", "(G, N/64, K/64, 128 * bits)", weight, {-1, -1, -1, -1}));
  const auto shape = weight.dimensions();
  *bits = static_cast<int>(shape[3] / 128);
  const bool known = mode == Mode::kAffine ? *bits >= 2 && *bits <= 8 && *bits != 7
                                           : *bits == (mode == Mode::kMxfp8 ? 8 : 4);
  if (shape[3] % 128 != 0 || !known) {
    return InvalidArgument(kOp, "weight has shape ", ShapeText(weight));
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "scales", "(G, N/64, K/64 or 128, words)", scales,
                                 {shape[0], shape[1], -1, -1}));
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {shape[0], 64 * shape[1], 64 * shape[2]}));
  for (const auto& buffer : {weight, scales}) {
    if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
      return Unimplemented(kOp, "weight and scales must be 16-byte aligned");
    }
  }
  const int64_t tiles = scales.dimensions()[2], words = scales.dimensions()[3];
  const bool one_tile = tiles == shape[2], two_tiles = 2 * tiles == shape[2];
  const bool fits = mode == Mode::kAffine
                        ? (one_tile && (words == 64 || words == 128)) || (two_tiles && words == 64)
                        : one_tile && words == (mode == Mode::kMxfp4 ? 32 : 64);
  if (!fits) return InvalidArgument(kOp, "scales has shape ", ShapeText(scales));
  quantized->tile_scales = static_cast<int>(4 * words / (one_tile ? 1 : 2));
  quantized->codes = weight.untyped_data();
  quantized->scales = scales.untyped_data();
  quantized->column_tiles = static_cast<int>(shape[1]);
  quantized->k_tiles = static_cast<int>(shape[2]);
  quantized->gemm.groups = static_cast<int>(shape[0]);
  quantized->gemm.n = static_cast<int>(64 * shape[1]);
  quantized->gemm.k = static_cast<int>(64 * shape[2]);
  return ffi::Error::Success();
}

static ffi::Error BindPackedOptions(ffi::RemainingArgs rest, bool global_scale, bool group_offset,
                                    bool bias, bool row_scale, QuantizedGemmSm90* quantized) {
  GemmSm90& gemm = quantized->gemm;
  Operands operands(kOp, rest);
  if (global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(kOp, gemm.groups, gemm.n, &operands, &quantized->global_scale));
  }
  if (group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &gemm.metadata));
  if (bias) JGG_RETURN_IF_ERROR(BindBias(kOp, &operands, gemm.groups, gemm.n, &gemm.epilogue));
  if (row_scale) JGG_RETURN_IF_ERROR(BindRowScale(kOp, &operands, gemm.rows_y, &gemm.epilogue));
  return operands.End();
}

static ffi::Error QmmPacked(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> out, std::string_view mode,
                            std::string_view kind, bool swapped, bool global_scale,
                            bool group_offset, bool bias, std::string_view activation,
                            bool row_scale) {
  const auto known_mode = ToMode(mode);
  if (!known_mode) {
    return InvalidArgument(kOp, "mode '", mode, "' is not one of affine, mxfp4, mxfp8, nvfp4");
  }
  const auto known_activation = ToActivation(activation);
  if (!known_activation) return InvalidArgument(kOp, "unknown activation '", activation, "'");
  QuantizedGemmSm90 quantized{};
  GemmSm90& gemm = quantized.gemm;
  int bits = 0;
  JGG_RETURN_IF_ERROR(BindPacked(weight, scales, *known_mode, &quantized, &bits));
  if (x.element_type() != ffi::BF16) return InvalidArgument(kOp, "x must be bfloat16");
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, gemm.k}));
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "out", out->element_type()));
  const bool gated = IsGated(*known_activation);
  const int64_t columns = gated ? gemm.n / 2 : gemm.n;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {-1, columns}));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, kind, metadata, swapped, &gemm.metadata));
  JGG_RETURN_IF_ERROR(CheckMm(kOp, gemm.metadata, x.dimensions()[0], out->dimensions()[0],
                              gemm.groups, gemm.n, gemm.k));
  gemm.rows_x = static_cast<int>(x.dimensions()[0]);
  gemm.rows_y = static_cast<int>(out->dimensions()[0]);
  gemm.epilogue.activation = *known_activation;
  gemm.out = out->untyped_data();
  gemm.out_dtype = *ToDType(out->element_type());
  gemm.out_width = WholeAlignedElements(gemm.out_dtype, gemm.out, {columns});
  gemm.out_line = columns;
  JGG_RETURN_IF_ERROR(
      BindPackedOptions(rest, global_scale, group_offset, bias, row_scale, &quantized));
  if (const char* problem = GemmSm90Problem(DType::kBF16, ComputeCapability())) {
    return Unimplemented(kOp, std::string("a weight of jax_groupgemm.prepack: ") + problem);
  }
  if (gated && columns % 64 != 0) {
    return Unimplemented(kOp, "the gated half of w is not a multiple of 64 columns");
  }
  OperandsSm90 operands{};
  operands.dtype = DType::kBF16;
  operands.l_k_major = true;
  operands.l = {x.untyped_data(), DType::kBF16, gemm.k, gemm.rows_x, 1, gemm.k, gemm.k};
  if (const char* problem = TensorMapProblem(operands.l)) return Unimplemented(kOp, problem);
  return FromCuda(kOp, LaunchPackedGemmSm90(stream, quantized, *known_mode, bits, operands));
}

XLA_FFI_DEFINE_HANDLER(kQmmPacked, QmmPacked,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scales
                           .Arg<ffi::AnyBuffer>()  // metadata
                           .RemainingArgs()        // global_scale, group_offset, bias, row_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<std::string_view>("mode")
                           .Attr<std::string_view>("kind")
                           .Attr<bool>("swapped")
                           .Attr<bool>("global_scale")
                           .Attr<bool>("group_offset")
                           .Attr<bool>("bias")
                           .Attr<std::string_view>("activation")
                           .Attr<bool>("row_scale"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmmPacked(XLA_FFI_CallFrame* call_frame) { return kQmmPacked(call_frame); }

}  // namespace jgg

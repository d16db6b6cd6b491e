// CUDA handler of qmm with weights in layout "sm90": bind, launch. Hopper only.

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
static ffi::Error BindPacked(ffi::AnyBuffer weight, ffi::AnyBuffer scales, const QuantizedWeight& w,
                             QuantizedGemmSm90* quantized) {
  for (const auto& buffer : {weight, scales}) {
    if (buffer.element_type() != ffi::U32) {
      return InvalidArgument(kOp, "weight and scales must be uint32");
    }
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "weight", "(G, N/64, K/64, 128 * bits)", weight,
                                 {-1, -1, -1, 128 * w.coding.bits}));
  const auto shape = weight.dimensions();
  const PackedScales packed = PackedScalesOf(w.coding.mode, w.group_size);
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "scales", "(G, N/64, K/64 or 128, words)", scales,
                                 {shape[0], shape[1], 64 * shape[2] / packed.k, packed.words}));
  if (64 * shape[2] % packed.k != 0) {
    return InvalidArgument(kOp, "weight has shape ", ShapeText(weight), ", expected K % ", packed.k,
                           " == 0");
  }
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {shape[0], 64 * shape[1], 64 * shape[2]}));
  for (const auto& buffer : {weight, scales}) {
    if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 != 0) {
      return Unimplemented(kOp, "weight and scales must be 16-byte aligned");
    }
  }
  quantized->tile_scales = 4 * packed.words * 64 / packed.k;
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
                                    const EpilogueAttrs& epilogue, QuantizedGemmSm90* quantized) {
  GemmSm90& gemm = quantized->gemm;
  Operands operands(kOp, rest);
  if (global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(kOp, gemm.groups, gemm.n, &operands, &quantized->global_scale));
  }
  if (group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &gemm.metadata));
  JGG_RETURN_IF_ERROR(
      BindEpilogue(kOp, epilogue, gemm.groups, gemm.n, gemm.rows_y, &operands, &gemm.epilogue));
  return operands.End();
}

static ffi::Error QmmPacked(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> out, QuantizedAttrs quantized_attrs,
                            MetadataAttrs metadata_attrs, EpilogueAttrs epilogue) {
  if (epilogue.existing_out) return InvalidArgument(kOp, "existing_out is not an operand of it");
  Activation activation = Activation::kNone;
  JGG_RETURN_IF_ERROR(BindActivation(kOp, epilogue, &activation));
  QuantizedWeight w{};
  JGG_RETURN_IF_ERROR(BindCoding(kOp, quantized_attrs, "sm90", &w));
  QuantizedGemmSm90 quantized{};
  GemmSm90& gemm = quantized.gemm;
  JGG_RETURN_IF_ERROR(BindPacked(weight, scales, w, &quantized));
  if (x.element_type() != ffi::BF16) return InvalidArgument(kOp, "x must be bfloat16");
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, gemm.k}));
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "out", out->element_type()));
  const bool gated = IsGated(activation);
  const int64_t columns = gated ? gemm.n / 2 : gemm.n;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {-1, columns}));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &gemm.metadata));
  JGG_RETURN_IF_ERROR(CheckMm(kOp, gemm.metadata, x.dimensions()[0], out->dimensions()[0],
                              gemm.groups, gemm.n, gemm.k));
  gemm.rows_x = static_cast<int>(x.dimensions()[0]);
  gemm.rows_y = static_cast<int>(out->dimensions()[0]);
  gemm.epilogue.activation = activation;
  gemm.out = out->untyped_data();
  gemm.out_dtype = *ToDType(out->element_type());
  gemm.out_width = WholeAlignedElements(gemm.out_dtype, gemm.out, {columns});
  gemm.out_line = columns;
  JGG_RETURN_IF_ERROR(BindPackedOptions(rest, quantized_attrs.global_scale,
                                        metadata_attrs.group_offset, epilogue, &quantized));
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
  return FromCuda(kOp, LaunchPackedGemmSm90(stream, quantized, w.coding, operands));
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
                           .Attr<QuantizedAttrs>("quantized")
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<EpilogueAttrs>("epilogue"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmmPacked(XLA_FFI_CallFrame* call_frame) { return kQmmPacked(call_frame); }

}  // namespace jgg

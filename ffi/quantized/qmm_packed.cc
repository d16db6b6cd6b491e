// CUDA handler of qmm with weights in layout "sm90": bind, launch. Hopper only.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "quantized/gemm_sm90.h"
#include "quantized/packed_bind.h"
#include "quantized/qmm_bind.h"
#include "quantized/rules.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "qmm_packed";

static ffi::Error BindPackedOptions(ffi::RemainingArgs rest, bool global_scale, bool group_offset,
                                    bool transpose_w, const EpilogueAttrs& epilogue, QmmSm90* qmm) {
  ProductSm90& product = qmm->mm.product;
  Operands operands(kOp, rest);
  if (global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(kOp, product.groups, product.n, &operands, &qmm->global_scale));
    if (!transpose_w && qmm->global_scale.column != 0) {
      return InvalidArgument(
          kOp, "global_scale has a number for each row of w, but w is quantized along N");
    }
  }
  if (group_offset) JGG_RETURN_IF_ERROR(BindGroupOffset(kOp, &operands, &product.metadata));
  JGG_RETURN_IF_ERROR(BindEpilogue(kOp, epilogue, product.groups, product.n, product.rows_y,
                                   &operands, &product.epilogue));
  return operands.End();
}

static ffi::Error QmmPacked(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> out, QuantizedAttrs quantized_attrs,
                            MetadataAttrs metadata_attrs, EpilogueAttrs epilogue,
                            QmmPlanAttrs plan_attrs, bool transpose_w) {
  if (epilogue.existing_out) return InvalidArgument(kOp, "existing_out is not an operand of it");
  Activation activation = Activation::kNone;
  JGG_RETURN_IF_ERROR(BindActivation(kOp, epilogue, &activation));
  QuantizedWeight w{};
  JGG_RETURN_IF_ERROR(BindCoding(kOp, quantized_attrs, "sm90", &w));
  QmmSm90 qmm{};
  PackedCodesSm90 packed{};
  ProductSm90& product = qmm.mm.product;
  JGG_RETURN_IF_ERROR(BindPacked(kOp, weight, scales, w, &packed));
  qmm.scales = scales.untyped_data();
  product.groups = weight.dimensions()[0];
  product.n = 64 * int64_t{transpose_w ? packed.column_tiles : packed.k_tiles};
  const int64_t k = qmm.mm.k = 64 * int64_t{transpose_w ? packed.k_tiles : packed.column_tiles};
  const bool half = x.element_type() == ffi::F16;
  if (x.element_type() != ffi::BF16 && !half) {
    return InvalidArgument(kOp, "x must be bfloat16 or float16");
  }
  if (w.coding.HasFloatScales() && packed.half_scales != half) {
    return InvalidArgument(kOp, "scales must have the dtype of x");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, k}));
  JGG_RETURN_IF_ERROR(CheckFloat(kOp, "out", out->element_type()));
  const bool gated = IsGated(activation);
  const int64_t columns = gated ? product.n / 2 : product.n;
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "out", "(T, N)", *out, {-1, columns}));
  JGG_RETURN_IF_ERROR(BindMetadata(kOp, metadata_attrs, metadata, &product.metadata));
  product.rows_x = x.dimensions()[0];
  product.rows_y = out->dimensions()[0];
  JGG_RETURN_IF_ERROR(
      CheckMm(kOp, product.metadata, product.rows_x, product.rows_y, product.groups, product.n, k));
  product.epilogue.activation = activation;
  product.out = out->untyped_data();
  product.out_dtype = *ToDType(out->element_type());
  product.out_line = columns;
  JGG_RETURN_IF_ERROR(BindPackedOptions(rest, quantized_attrs.global_scale,
                                        metadata_attrs.group_offset, transpose_w, epilogue, &qmm));
  const DType dtype = half ? DType::kF16 : DType::kBF16;
  if (const char* problem = GemmSm90Problem(dtype, ComputeCapability())) {
    return Unimplemented(kOp, std::string("a weight of jax_groupgemm.prepack: ") + problem);
  }
  if (auto reason = rules::QmmPackedProblem(product.n, gated)) return Unimplemented(kOp, *reason);
  rules::QmmPlanSm90 plan;
  JGG_RETURN_IF_ERROR(BindPlan(kOp, plan_attrs, w.coding,
                               {k, product.n, gated, true, !transpose_w, half}, product.rows_x,
                               product.rows_y, product.metadata, &plan));
  OperandsSm90 operands{};
  operands.dtype = dtype;
  operands.l_k_major = true;
  operands.l = {x.untyped_data(), dtype, k, product.rows_x, 1, k, k};
  if (const char* problem = TensorMapProblem(operands.l)) return Unimplemented(kOp, problem);
  QuantizedGemmSm90 quantized = MakeQuantizedGemmSm90(qmm);
  quantized.packed = packed;
  const auto launch = transpose_w ? LaunchPackedGemmSm90 : LaunchTransposedGemmSm90;
  return FromCuda(kOp, launch(stream, quantized, w.coding, plan, operands));
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
                           .Attr<EpilogueAttrs>("epilogue")
                           .Attr<QmmPlanAttrs>("plan")
                           .Attr<bool>("transpose_w"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmmPacked(XLA_FFI_CallFrame* call_frame) { return kQmmPacked(call_frame); }

}  // namespace jgg

// CUDA handler of qmm with weights in layout "sm90": bind, launch. Hopper's kernels, or the generic
// one.

#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"
#include "quantized/gemm_sm90.h"
#include "quantized/packed_bind.h"
#include "quantized/packed_sm80.h"
#include "quantized/qmm_bind.h"
#include "quantized/rules.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "qmm_packed";

// Rows (T, rank) and weights (G, rank, N) of x's type, whose product is added.
static ffi::Error BindAdapter(ffi::DataType dtype, Operands* operands, QmmSm90* qmm) {
  const ProductSm90& product = qmm->mm.product;
  const auto rows = operands->Take("adapter's rows");
  if (rows.has_error()) return rows.error();
  const auto weights = operands->Take("adapter's weights");
  if (weights.has_error()) return weights.error();
  if (rows->element_type() != dtype || weights->element_type() != dtype) {
    return InvalidArgument(kOp, "an adapter must have the dtype of x");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "adapter's rows", "(T, rank)", *rows, {product.rows_x, -1}));
  const int64_t rank = rows->dimensions()[1];
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "adapter's weights", "(G, rank, N)", *weights,
                                 {product.groups, rank, product.n}));
  if (auto reason = rules::AdapterProblem(rank)) return InvalidArgument(kOp, *reason);
  qmm->adapter = {rows->untyped_data(), weights->untyped_data(), rank};
  return ffi::Error::Success();
}

static ffi::Error BindPackedOptions(ffi::RemainingArgs rest, bool global_scale, bool group_offset,
                                    bool transpose_w, const EpilogueAttrs& epilogue, bool sixteens,
                                    const void** x_sums, const ffi::DataType* adapter,
                                    QmmSm90* qmm) {
  ProductSm90& product = qmm->mm.product;
  Operands operands(kOp, rest);
  if (x_sums != nullptr) {
    const int64_t fours = (qmm->mm.k + 127) / 128 * (sixteens ? 2 : 1);
    JGG_RETURN_IF_ERROR(BindXSums(kOp, product.rows_x, fours, &operands, x_sums));
  }
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
  if (adapter != nullptr) JGG_RETURN_IF_ERROR(BindAdapter(*adapter, &operands, qmm));
  return operands.End();
}

// By the kernel of every GPU (packed_sm80.h).
static ffi::Error LaunchGeneric(cudaStream_t stream, const QmmSm90& qmm,
                                const PackedCodesSm90& packed, const Coding& coding, const void* x,
                                DType dtype) {
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  if (reinterpret_cast<uintptr_t>(x) % 16 != 0) {
    return Unimplemented(kOp, "x must be 16-byte aligned");
  }
  return FromCuda(kOp, QmmPackedSm80(stream, qmm, packed, coding, x, dtype));
}

static ffi::Error QmmPacked(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::AnyBuffer scales, ffi::AnyBuffer metadata, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> out, QuantizedAttrs quantized_attrs,
                            MetadataAttrs metadata_attrs, EpilogueAttrs epilogue,
                            QmmPlanAttrs plan_attrs, bool transpose_w, bool adapter) {
  if (epilogue.existing_out) return InvalidArgument(kOp, "existing_out is not an operand of it");
  Activation activation = Activation::kNone;
  JGG_RETURN_IF_ERROR(BindActivation(kOp, epilogue, &activation));
  QuantizedWeight w{};
  JGG_RETURN_IF_ERROR(BindCoding(kOp, quantized_attrs, "sm90", &w));
  QmmSm90 qmm{};
  PackedCodesSm90 packed{};
  ProductSm90& product = qmm.mm.product;
  const bool scaled = plan_attrs.way == "scaled";
  JGG_RETURN_IF_ERROR(BindPacked(kOp, weight, scales, w, &packed, scaled));
  qmm.scales = scales.untyped_data();
  product.groups = weight.dimensions()[0];
  product.n = 64 * int64_t{transpose_w ? packed.column_tiles : packed.k_tiles};
  const int64_t k = qmm.mm.k = 64 * int64_t{transpose_w ? packed.k_tiles : packed.column_tiles};
  const bool half = x.element_type() == ffi::F16;
  const bool floats = scaled && !transpose_w && plan_attrs.tile == rules::kTransposedScaledFewRows;
  if (floats && x.element_type() != ffi::F32) return InvalidArgument(kOp, "x must be float32");
  if (!floats && x.element_type() != ffi::BF16 && !half) {
    return InvalidArgument(kOp, "x must be bfloat16 or float16");
  }
  if (w.coding.HasFloatScales() && packed.half_scales != half && !scaled) {
    return InvalidArgument(kOp, "scales must have the dtype of x");
  }
  const int64_t planes = plan_attrs.planes;
  if (planes != 1 && !(planes == rules::kMostScaledPlanes && scaled)) {
    return InvalidArgument(kOp, "no kernel takes x in ", planes, " planes");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, planes * K)", x, {-1, planes * k}));
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
  const void* x_sums = nullptr;
  const bool needs_sums = scaled && transpose_w && plan_attrs.tile == rules::kScaledTileRows &&
                          w.coding.HasFloatScales();
  const ffi::DataType x_type = x.element_type();
  JGG_RETURN_IF_ERROR(BindPackedOptions(
      rest, quantized_attrs.global_scale, metadata_attrs.group_offset, transpose_w, epilogue,
      packed.tile_groups == 4, needs_sums ? &x_sums : nullptr, adapter ? &x_type : nullptr, &qmm));
  const DType dtype = half ? DType::kF16 : DType::kBF16;
  const char* problem = GemmSm90Problem(dtype, ComputeCapability());
  // A plan for Hopper is of a process that knew of no GPU, where another one meets it.
  const bool generic = plan_attrs.way == rules::kGenericWay;
  if (generic || problem != nullptr) {
    auto reason = rules::QmmPackedSm80Problem(FactsOf(w.coding.mode, w.coding.bits), w.group_size,
                                              product.n, gated);
    if (scaled || adapter || !transpose_w) reason = "the generic kernel has no such product";
    if (!reason) return LaunchGeneric(stream, qmm, packed, w.coding, x.untyped_data(), dtype);
    if (generic) return Unimplemented(kOp, *reason);
    return Unimplemented(kOp, std::string("a weight of jax_groupgemm.prepack: ") + problem);
  }
  if (auto reason = rules::QmmPackedProblem(product.n, gated)) return Unimplemented(kOp, *reason);
  rules::QmmPlanSm90 plan;
  JGG_RETURN_IF_ERROR(
      BindPlan(kOp, plan_attrs, w.coding,
               {k, product.n, gated, true, !transpose_w, half, scaled ? plan_attrs.planes : 0},
               product.rows_x, product.rows_y, product.metadata, &plan));
  if (adapter && !rules::TakesAdapter(plan, gated)) {
    return InvalidArgument(kOp, "no kernel of this plan takes an adapter");
  }
  OperandsSm90 operands{};
  operands.dtype = dtype;
  operands.l_k_major = true;
  const DType x_dtype = floats ? DType::kF32 : dtype;
  operands.l = {x.untyped_data(), x_dtype, k, product.rows_x, planes, planes * k, k};
  if (const char* problem = TensorMapProblem(operands.l)) return Unimplemented(kOp, problem);
  QuantizedGemmSm90 quantized = MakeQuantizedGemmSm90(qmm);
  quantized.packed = packed;
  quantized.planes = static_cast<int>(planes);
  quantized.x_sums = static_cast<const float4*>(x_sums);
  if (adapter) {
    const auto specs = DescribeAdapterSm90(qmm, dtype);
    for (const TensorMapSpec& spec : {specs.rows, specs.weights}) {
      if (const char* problem = TensorMapProblem(spec)) return Unimplemented(kOp, problem);
    }
    JGG_RETURN_IF_ERROR(FromCuda(kOp, EncodeAdapterSm90(qmm, dtype, &quantized)));
  }
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
                           // x_sums, global_scale, group_offset, bias, row_scale, an adapter's
                           // rows and weights
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<QuantizedAttrs>("quantized")
                           .Attr<MetadataAttrs>("metadata")
                           .Attr<EpilogueAttrs>("epilogue")
                           .Attr<QmmPlanAttrs>("plan")
                           .Attr<bool>("transpose_w")
                           .Attr<bool>("adapter"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggQmmPacked(XLA_FFI_CallFrame* call_frame) { return kQmmPacked(call_frame); }

}  // namespace jgg

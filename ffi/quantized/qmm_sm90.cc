// qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]; T (rows) is grouped.
#include "quantized/qmm_sm90.h"

#include "quantized/gemm_sm90.h"
#include "quantized/qmm_sm80.h"
#include "quantized/rules.h"

namespace jgg {

static OperandsSm90 DescribeOperands(const QmmArgs& args) {
  const QuantizedWeight& w = args.w;
  const bool floats = args.dtype == DType::kF32;  // which become bfloat16
  OperandsSm90 operands{};
  operands.dtype = floats ? DType::kBF16 : args.dtype;
  operands.planes = 1;
  operands.l_k_major = operands.r_k_major = true;
  const int64_t columns = floats && args.transpose_w ? args.k : PaddedK(args.k, args.transpose_w);
  operands.l = {args.x, args.dtype, columns, args.rows_x, 1, columns, columns};
  const int64_t line = w.elements * w.coding.bits / 16;
  operands.r = {w.packed, DType::kBF16, line, w.lines, w.groups, line, line * w.lines};
  operands.r.box_lines = 64;
  operands.r.box_inner = w.coding.bits * 8;
  return operands;
}

std::optional<std::string> qmm_sm90_unsupported(const QmmArgs& args, int compute_capability) {
  const bool floats = args.scaled && args.dtype == DType::kF32;
  if (args.scaled && !args.transpose_w && !floats) return "x is not float32";
  const DType dtype = floats ? DType::kBF16 : args.dtype;
  if (const char* problem = GemmSm90Problem(dtype, compute_capability)) return problem;
  const Coding& coding = args.w.coding;
  rules::QmmShape shape{args.w.elements, coding.bits};
  shape.bfloat16_x = dtype == DType::kBF16;
  shape.bfloat16_scales = !coding.HasFloatScales() || coding.scale_dtype == DType::kBF16;
  const bool half_scales = !coding.HasFloatScales() || coding.scale_dtype == DType::kF16;
  shape.half = args.dtype == DType::kF16 && half_scales;
  shape.scaled = args.scaled;
  shape.transpose_w = args.transpose_w;
  shape.in_order = args.in_order;
  shape.has_options = args.epilogue.Any();
  if (auto reason = rules::GroupsSm90Problem(coding.Facts(), args.w.group_size)) return reason;
  if (auto reason = rules::QmmSm90Problem(shape)) return reason;
  for (const void* scales : {args.w.scales, args.w.biases}) {
    if (reinterpret_cast<uintptr_t>(scales) % 4 != 0) return "scales are not 4-byte aligned";
  }
  const OperandsSm90 operands = DescribeOperands(args);
  for (const TensorMapSpec& spec : {operands.l, operands.r}) {
    if (const char* problem = TensorMapProblem(spec)) return problem;
  }
  return std::nullopt;
}

cudaError_t qmm_sm90(cudaStream_t stream, const QmmArgs& args, const rules::QmmPlanSm90& plan) {
  const int64_t columns = IsGated(args.epilogue.activation) ? args.n / 2 : args.n;
  QmmSm90 qmm{};
  ProductSm90& product = qmm.mm.product;
  product.metadata = args.metadata;
  product.epilogue = args.epilogue;
  product.out = args.out;
  product.out_dtype = args.out_dtype;
  product.out_line = columns;
  product.rows_x = args.rows_x;
  product.rows_y = args.rows_y;
  product.n = args.n;
  product.groups = args.w.groups;
  qmm.mm.k = args.k;
  qmm.scales = args.w.scales;
  qmm.global_scale = args.w.global_scale;
  QuantizedGemmSm90 quantized = MakeQuantizedGemmSm90(qmm);
  quantized.biases = args.w.biases;
  quantized.packed.half_scales = args.w.coding.scale_dtype == DType::kF16;
  quantized.packed.float_scales = args.w.coding.scale_dtype == DType::kF32;
  quantized.x_sums = static_cast<const float4*>(args.x_sums);
  quantized.elements = static_cast<int>(args.k);
  if (args.w.coding.Facts().scale == ScaleType::kFloat32) {
    quantized.rows_each = args.w.lines_each;
    quantized.columns_each = args.w.group_size;
    quantized.scale_lines = static_cast<int>((args.w.lines - 1) / args.w.lines_each + 1);
    quantized.scale_line = static_cast<int>((args.w.elements - 1) / args.w.group_size + 1) * 4;
  } else {
    while (1 << quantized.scale_shift < args.w.group_size) ++quantized.scale_shift;
    quantized.scale_line =
        static_cast<int>(args.w.elements / args.w.group_size) * args.w.coding.ScaleBytes();
  }
  const auto launch = args.transpose_w ? LaunchLinearGemmSm90 : LaunchTransposedGemmSm90;
  return launch(stream, quantized, args.w.coding, plan, DescribeOperands(args));
}

}  // namespace jgg

// wgrad: out[weight_s] += x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
#include "grouped_mm/wgrad_sm90.h"

#include "common/alignment.h"
#include "grouped_mm/gemm_sm90.h"

namespace jgg {

// One matrix whose rows are contracted.
static TensorMapSpec DescribeMatrix(const void* data, DType dtype, int64_t rows, int64_t columns,
                                    bool k_major, int planes) {
  const int64_t line = planes * (k_major ? rows : columns);
  return TensorMapSpec{data, dtype, line, k_major ? columns : rows, 1, line, line};
}

static OperandsSm90 DescribeOperands(const WgradArgs& args) {
  OperandsSm90 operands{};
  operands.dtype = args.dtype;
  operands.planes = args.planes;
  operands.tile = args.tile;
  operands.l_k_major = args.strides.x_row == 1 && args.strides.x_a != 1;
  operands.r_k_major = args.strides.y_row == 1 && args.strides.y_b != 1;
  operands.l =
      DescribeMatrix(args.x, args.dtype, args.rows_x, args.a, operands.l_k_major, args.planes);
  operands.r =
      DescribeMatrix(args.y, args.dtype, args.rows_y, args.b, operands.r_k_major, args.planes);
  return operands;
}

std::optional<std::string> wgrad_sm90_unsupported(const WgradArgs& args, int compute_capability) {
  if (const char* problem = GemmSm90Problem(args.dtype, compute_capability)) return problem;
  if (!args.own_weight) return "weights may have several segments";
  const OperandsSm90 operands = DescribeOperands(args);
  if (args.planes > 1 && ((operands.l_k_major ? args.rows_x : args.a) % 8 != 0 ||
                          (operands.r_k_major ? args.rows_y : args.b) % 8 != 0)) {
    return "planes of split operands are not a multiple of 16 bytes";
  }
  if (operands.l_k_major && operands.r_k_major && args.metadata.kind == MetadataKind::kSegments) {
    return "both operands are contiguous along k, and segments may begin at different places in "
           "them";
  }
  for (const TensorMapSpec& spec : {operands.l, operands.r}) {
    if (const char* problem = TensorMapProblem(spec)) return problem;
  }
  return std::nullopt;
}

cudaError_t wgrad_sm90(cudaStream_t stream, const WgradArgs& args) {
  GemmSm90 gemm{};
  gemm.wgrad = true;
  gemm.matrices = args.metadata.kind != MetadataKind::kSizes;
  gemm.metadata = args.metadata;
  gemm.out = args.out;
  gemm.out_dtype = args.out_dtype;
  gemm.out_width = WholeAlignedElements(args.out_dtype, args.out, {args.b});
  gemm.out_line = args.b;
  gemm.out_group = args.a * args.b;
  gemm.rows_x = static_cast<int>(args.rows_x);
  gemm.rows_y = static_cast<int>(args.rows_y);
  gemm.m = static_cast<int>(args.a);
  gemm.n = static_cast<int>(args.b);
  gemm.groups = static_cast<int>(args.groups);
  gemm.matrix_scale = args.scale;
  gemm.epilogue.accumulate = args.accumulate;
  return LaunchGemmSm90(stream, gemm, DescribeOperands(args));
}

}  // namespace jgg

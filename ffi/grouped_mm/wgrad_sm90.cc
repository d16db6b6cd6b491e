// wgrad: out[weight_s] += x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
#include "grouped_mm/wgrad_sm90.h"

#include <utility>

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/gemm_sm90.h"
#include "grouped_mm/shapes.h"

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
  operands.plan = args.plan;
  operands.l_k_major = args.strides.x_row == 1 && args.strides.x_a != 1;
  operands.r_k_major = args.strides.y_row == 1 && args.strides.y_b != 1;
  // An operand that does not come by list has as many rows as its list would.
  operands.l = DescribeMatrix(args.x, args.dtype, args.x_list.count, args.a, operands.l_k_major,
                              args.planes);
  operands.r = DescribeMatrix(args.y, args.dtype, args.y_list.count, args.b, operands.r_k_major,
                              args.planes);
  return operands;
}

std::optional<std::string> wgrad_sm90_unsupported(const WgradArgs& args, int compute_capability) {
  if (const char* problem = GemmSm90Problem(args.dtype, compute_capability)) return problem;
  const OperandsSm90 operands = DescribeOperands(args);
  if (auto reason = rules::WgradSm90Problem(DescribeShape(args))) return reason;
  for (const TensorMapSpec& spec : {operands.l, operands.r}) {
    if (const char* problem = TensorMapProblem(spec)) return problem;
  }
  return std::nullopt;
}

std::optional<std::string> wgrad_sm90_plan_problem(const WgradArgs& args) {
  return rules::PlanWgradProblem(args.plan, DescribeShape(args));
}

cudaError_t wgrad_sm90(cudaStream_t stream, const WgradArgs& args) {
  WgradSm90 wgrad{};
  wgrad.product.metadata = args.metadata;
  wgrad.product.epilogue.accumulate = args.accumulate;
  wgrad.product.out = args.out;
  wgrad.product.out_dtype = args.out_dtype;
  wgrad.product.out_line = args.b;
  wgrad.product.rows_x = args.rows_x;
  wgrad.product.rows_y = args.rows_y;
  wgrad.product.n = args.b;
  wgrad.product.groups = args.groups;
  wgrad.m = args.a;
  wgrad.out_group = args.a * args.b;
  wgrad.matrices = args.metadata.kind != MetadataKind::kSizes;
  wgrad.matrix_scale = args.scale;
  OperandsSm90 operands = DescribeOperands(args);
  if (!args.ByList()) {
    GemmSm90 gemm = MakeGemmSm90(wgrad);
    return LaunchGemmSm90(stream, gemm, operands);
  }
  // The operand that comes by list is R, so the result is stored transposed where that is x.
  const bool transposed = args.x_list.list != nullptr;
  if (transposed) {
    wgrad.m = args.b;
    wgrad.product.n = args.a;
    std::swap(operands.l, operands.r);
  }
  OperandByListSm90 by_list{MakeGemmSm90(wgrad), transposed ? args.x : args.y,
                            transposed ? args.x_list : args.y_list};
  return LaunchOperandByListSm90(stream, by_list, operands, transposed);
}

}  // namespace jgg

// mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
#include "grouped_mm/mm_sm90.h"

#include "grouped_mm/gathered_gemm_sm90.h"

namespace jgg {

static OperandsSm90 DescribeOperands(const MmArgs& args) {
  OperandsSm90 operands{};
  operands.dtype = args.dtype;
  operands.planes = args.planes;
  operands.tile = args.tile;
  operands.l_k_major = true;
  operands.r_k_major = args.strides.w_k == 1;
  const int64_t k = args.planes * args.k, n = args.planes * args.n;
  const int64_t group = args.planes * args.strides.w_group;
  operands.l = {args.x, args.dtype, k, args.x_list.count, 1, k, k};
  operands.r = operands.r_k_major
                   ? TensorMapSpec{args.w, args.dtype, k, args.n, args.groups, k, group}
                   : TensorMapSpec{args.w, args.dtype, n, args.k, args.groups, n, group};
  return operands;
}

std::optional<std::string> mm_sm90_unsupported(const MmArgs& args, int compute_capability) {
  if (const char* problem = GemmSm90Problem(args.dtype, compute_capability)) return problem;
  if (!args.in_order) return "segments may overlap or come in any order";
  if (args.strides.x_k != 1) return "x is transposed";
  if (args.strides.out_n != 1) return "the result is transposed";
  if (IsGated(args.epilogue.activation) && args.strides.w_n == 1 && args.n / 2 % 8 != 0) {
    return "the gated half of w begins inside 16 bytes";
  }
  if (args.planes > 1) {
    if (args.ByList()) return "rows by list of split operands";
    if (IsGated(args.epilogue.activation)) return "a gated activation of split operands";
    // Behind the k of one plane comes the next.
    if (args.k % 64 != 0) return "K of split operands is not a multiple of 64";
    if (args.strides.w_n == 1 && args.n % 8 != 0)
      return "N of split operands is not a multiple of 8";
  }
  const OperandsSm90 operands = DescribeOperands(args);
  for (const TensorMapSpec& spec : {operands.l, operands.r}) {
    if (const char* problem = TensorMapProblem(spec)) return problem;
  }
  return std::nullopt;
}

cudaError_t mm_sm90(cudaStream_t stream, const MmArgs& args) {
  MmSm90 mm{};
  mm.product.metadata = args.metadata;
  mm.product.epilogue = args.epilogue;
  mm.product.out = args.out;
  mm.product.out_dtype = args.out_dtype;
  mm.product.out_line = args.strides.out_row;
  mm.product.rows_x = args.rows_x;
  mm.product.rows_y = args.rows_y;
  mm.product.n = args.n;
  mm.product.groups = args.groups;
  mm.k = args.k;
  GemmSm90 gemm = MakeGemmSm90(mm);
  if (!args.ByList()) return LaunchGemmSm90(stream, gemm, DescribeOperands(args));
  GatheredGemmSm90 gathered{gemm, args.x, args.x_list, args.y_list};
  return LaunchGatheredGemmSm90(stream, gathered, DescribeOperands(args));
}

}  // namespace jgg

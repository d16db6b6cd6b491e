// mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
#include "grouped_mm/mm_sm90.h"

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/shapes.h"
#include "grouped_mm/up_and_down_sm90.h"

namespace jgg {

static OperandsSm90 DescribeOperands(const MmArgs& args) {
  OperandsSm90 operands{};
  operands.dtype = args.dtype;
  operands.planes = args.planes;
  operands.plan = args.plan;
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
  if (auto reason = rules::MmSm90Problem(DescribeShape(args))) return reason;
  const OperandsSm90 operands = DescribeOperands(args);
  for (const TensorMapSpec& spec : {operands.l, operands.r}) {
    if (const char* problem = TensorMapProblem(spec)) return problem;
  }
  return std::nullopt;
}

static rules::MmRows DescribeRows(const MmArgs& args) {
  const Epilogue& epilogue = args.epilogue;
  rules::MmRows rows{args.rows_y, args.metadata.count};
  rows.y_by_list = args.y_list.list != nullptr;
  rows.bias = epilogue.bias != nullptr;
  rows.activation = epilogue.activation != Activation::kNone && !IsGated(epilogue.activation);
  rows.rounds = epilogue.rounds_preactivation;
  rows.float32_out = args.out_dtype == DType::kF32;
  return rows;
}

std::optional<std::string> mm_sm90_plan_problem(const MmArgs& args) {
  return rules::PlanMmProblem(args.plan, DescribeShape(args), DescribeRows(args));
}

rules::PlanSm90 mm_sm90_plan(const MmArgs& args) {
  return rules::PlanMmSm90(DescribeShape(args), DescribeRows(args));
}

static GemmSm90 MakeGemm(const MmArgs& args) {
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
  return MakeGemmSm90(mm);
}

cudaError_t mm_sm90(cudaStream_t stream, const MmArgs& args) {
  GemmSm90 gemm = MakeGemm(args);
  switch (args.plan.rows) {
    case rules::RowsBy::kOrder: break;
    case rules::RowsBy::kList: {
      RowsByListSm90 by_list{gemm, args.x, args.x_list, args.y_list};
      return LaunchRowsByListSm90(stream, by_list, DescribeOperands(args));
    }
    case rules::RowsBy::kOperandList: {
      OperandByListSm90 by_list{gemm, args.x, args.x_list};
      return LaunchOperandByListSm90(stream, by_list, DescribeOperands(args), false);
    }
  }
  return LaunchGemmSm90(stream, gemm, DescribeOperands(args));
}

bool mm_sm90_has_up_and_down(const MmArgs& up, const MmArgs& down) {
  constexpr int kTile = 32;
  const auto has = [&](const MmArgs& args) {
    return args.planes == 1 && args.plan.tile == kTile && args.plan.rows == rules::RowsBy::kOrder &&
           args.out_dtype == args.dtype;
  };
  const Epilogue& gate = up.epilogue;
  return has(up) && has(down) &&
         DescribeOperands(up).r_k_major == DescribeOperands(down).r_k_major &&
         IsGated(gate.activation) && gate.bias == nullptr && gate.row_scale == nullptr &&
         !gate.accumulate && gate.preactivation == nullptr && !down.epilogue.Any() &&
         HasTilesOfBoth(MakeGemm(down));
}

cudaError_t mm_sm90_up_and_down(cudaStream_t stream, const MmArgs& up, const MmArgs& down,
                                int32_t* turns) {
#ifdef JGG_SM90
  DenseUpAndDownSm90 both{{MakeGemm(up), MakeGemm(down)}, turns};
  return LaunchDenseUpAndDownSm90(stream, both, DescribeOperands(up), DescribeOperands(down));
#endif
  return cudaErrorNoKernelImageForDevice;
}

cudaError_t mm_backward_sm90(cudaStream_t stream, const MmArgs& args,
                             const DownBackwardArgs& backward) {
  BackwardByListSm90 by_list{{MakeGemm(args), args.x, args.x_list}, {}};
  by_list.backward.h = backward.h;
  by_list.backward.dh = backward.dh;
  by_list.backward.row_scale = backward.row_scale;
  by_list.backward.row_sums = backward.row_sums;
  return LaunchBackwardByListSm90(stream, by_list, DescribeOperands(args));
}

}  // namespace jgg

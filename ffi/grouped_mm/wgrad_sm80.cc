// wgrad: out[weight_s] += x_s^T @ y_s over the rows of segment s; T (contracted) is grouped.
#include "grouped_mm/wgrad_sm80.h"

#include "common/alignment.h"
#include "common/arch.h"
#include "grouped_mm/gemm_sm80.h"

namespace jgg {

std::optional<std::string> wgrad_sm80_unsupported(const WgradArgs& args, int compute_capability) {
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t wgrad_sm80(cudaStream_t stream, const WgradArgs& args) {
  const bool x_k_major = args.strides.x_row == 1, y_k_major = args.strides.y_row == 1;
  GemmSm80 gemm{};
  gemm.product = GemmSm80::Product::kWgrad;
  gemm.order = !args.own_weight                             ? GemmSm80::Order::kResult
               : args.metadata.kind == MetadataKind::kSizes ? GemmSm80::Order::kSegments
                                                            : GemmSm80::Order::kMatrices;
  gemm.a = args.x;
  gemm.b = args.y;
  gemm.out = args.out;
  gemm.out_dtype = args.out_dtype;
  gemm.a_line = x_k_major ? args.strides.x_a : args.strides.x_row;
  gemm.b_line = y_k_major ? args.strides.y_b : args.strides.y_row;
  gemm.a_width = AlignedElements(args.dtype, args.x, {gemm.a_line});
  gemm.b_width = AlignedElements(args.dtype, args.y, {gemm.b_line});
  gemm.rows_x = args.rows_x;
  gemm.rows_y = args.rows_y;
  gemm.m = args.a;
  gemm.n = args.b;
  gemm.groups = args.groups;
  gemm.out_group = args.a * args.b;
  gemm.out_m = args.b;
  gemm.out_n = 1;
  gemm.out_width = WholeAlignedElements(args.out_dtype, args.out, {args.b});
  gemm.metadata = args.metadata;
  return LaunchGemmSm80(stream, gemm, args.dtype, args.tf32, x_k_major, y_k_major);
}

}  // namespace jgg

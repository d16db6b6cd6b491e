// mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
#include "grouped_mm/mm_sm80.h"

#include "common/alignment.h"
#include "common/arch.h"
#include "grouped_mm/gemm_sm80.h"

namespace jgg {

std::optional<std::string> mm_sm80_unsupported(const MmArgs& args, int compute_capability) {
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t mm_sm80(cudaStream_t stream, const MmArgs& args) {
  const bool x_k_major = args.strides.x_k == 1, w_k_major = args.strides.w_k == 1;
  const int64_t columns = IsGated(args.epilogue.activation) ? args.n / 2 : args.n;
  GemmSm80 gemm{};
  gemm.product = GemmSm80::Product::kMm;
  gemm.order = args.in_order ? GemmSm80::Order::kSegments : GemmSm80::Order::kDetect;
  gemm.a = args.x;
  gemm.b = args.w;
  gemm.out = args.out;
  gemm.out_dtype = args.out_dtype;
  gemm.a_line = x_k_major ? args.strides.x_row : args.strides.x_k;
  gemm.b_line = w_k_major ? args.strides.w_n : args.strides.w_k;
  gemm.b_group = args.strides.w_group;
  gemm.a_width = AlignedElements(args.dtype, args.x, {gemm.a_line});
  // The second half of a gated N begins in the middle of a line.
  gemm.b_width = AlignedElements(args.dtype, args.w,
                                 {gemm.b_line, gemm.b_group,
                                  w_k_major           ? 0
                                  : columns == args.n ? 0
                                                      : columns});
  gemm.rows_x = args.rows_x;
  gemm.rows_y = args.rows_y;
  gemm.n = args.n;
  gemm.k = args.k;
  gemm.groups = args.groups;
  gemm.out_m = args.strides.out_row;
  gemm.out_n = args.strides.out_n;
  gemm.out_width = WholeAlignedElements(args.out_dtype, args.out, {gemm.out_m, columns});
  gemm.metadata = args.metadata;
  gemm.epilogue = args.epilogue;
  return LaunchGemmSm80(stream, gemm, args.dtype, args.tf32, x_k_major, w_k_major);
}

}  // namespace jgg

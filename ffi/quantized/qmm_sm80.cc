// qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]; T (rows) is grouped.
#include "quantized/qmm_sm80.h"

#include "common/alignment.h"
#include "common/arch.h"
#include "quantized/gemm_sm80.h"

namespace jgg {

std::optional<std::string> qmm_sm80_unsupported(const QmmArgs& args, int compute_capability) {
  return NeedsComputeCapability(80, compute_capability);
}

static QuantizedGemmSm80 MakeGemm(const QmmArgs& args) {
  const int64_t columns = IsGated(args.epilogue.activation) ? args.n / 2 : args.n;
  QuantizedGemmSm80 quantized{};
  quantized.w = args.w;
  GemmSm80& gemm = quantized.gemm;
  gemm.product = GemmSm80::Product::kMm;
  gemm.order = args.in_order ? GemmSm80::Order::kSegments : GemmSm80::Order::kDetect;
  gemm.a = args.x;
  gemm.out = args.out;
  gemm.out_dtype = args.out_dtype;
  gemm.a_line = args.k;
  gemm.a_width = AlignedElements(args.dtype, args.x, {gemm.a_line});
  gemm.rows_x = args.rows_x;
  gemm.rows_y = args.rows_y;
  gemm.n = args.n;
  gemm.k = args.k;
  gemm.groups = args.w.groups;
  gemm.out_m = columns;
  gemm.out_n = 1;
  gemm.out_width = WholeAlignedElements(args.out_dtype, args.out, {columns});
  gemm.metadata = args.metadata;
  gemm.epilogue = args.epilogue;
  return quantized;
}

cudaError_t qmm_sm80(cudaStream_t stream, const QmmArgs& args) {
  return LaunchQuantizedGemmSm80(stream, MakeGemm(args), args.dtype, args.tf32, args.transpose_w);
}

}  // namespace jgg

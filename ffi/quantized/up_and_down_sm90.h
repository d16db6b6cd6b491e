// Two products one after the other in one kernel: those of some tokens' experts, in tiles of 16
// rows. The first one's epilogue is a gated activation, and its result is the second one's x.
#pragma once

#include "grouped_mm/up_and_down_sm90.h"
#include "quantized/gemm_sm90.h"

namespace jgg {

struct UpAndDownSm90 {
  QuantizedGemmSm90 products[2];
  int32_t* turns;
};

// One of the two products, as for LaunchPackedGemmSm90.
struct PackedProductSm90 {
  QuantizedGemmSm90 quantized;
  Coding coding;
  rules::QmmPlanSm90 plan;
  OperandsSm90 operands;
};

// Whether there is such a kernel for two products that HasSixteens.
inline bool HasUpAndDownSm90(const PackedProductSm90& up, const PackedProductSm90& down) {
  const auto has = [](const PackedProductSm90& of) {
    return of.coding.mode == Mode::kNvfp4 && of.operands.dtype == DType::kBF16 &&
           of.quantized.gemm.out_dtype == DType::kBF16 && HasSixteens(of.quantized.gemm, of.plan);
  };
  return has(up) && has(down) && !down.quantized.gemm.epilogue.Any();
}

// Encodes the tensor maps and launches. HasUpAndDownSm90 has said so.
cudaError_t LaunchUpAndDownSm90(cudaStream_t stream, const PackedProductSm90& up,
                                const PackedProductSm90& down, int32_t* turns);

// Instances: format_sm90_instance.cu.
template <Mode kMode, int kBits>
cudaError_t LaunchUpAndDownInstanceSm90(cudaStream_t stream, UpAndDownSm90& both,
                                        const OperandsSm90& up, const OperandsSm90& down);

}  // namespace jgg

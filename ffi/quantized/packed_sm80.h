// Products with weights in layout "sm90" (gemm_sm90.h) on every GPU: mma.sync takes what threads
// decode as WGMMA does.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm80.h"
#include "quantized/quantized.h"

namespace jgg {

// x is bfloat16 or float16, as are affine scales, in groups of 32 or more. Segments' rows are
// ascending and disjoint.
struct PackedGemmSm80 {
  GemmSm80 gemm;  // A and the result; b is not used
  PackedCodesSm90 packed;
  const void* scales;
  GlobalScale global_scale;
};

struct QmmSm90;

// A product as the handler describes it. x is 16-byte aligned, and QmmPackedSm80Problem has passed
// the weight.
cudaError_t QmmPackedSm80(cudaStream_t stream, const QmmSm90& qmm, const PackedCodesSm90& packed,
                          const Coding& coding, const void* x, DType dtype);

// Instances: packed_sm80_instance.cu.
template <Mode kMode, DType kX>
cudaError_t LaunchPackedInstanceSm80(cudaStream_t stream, const PackedGemmSm80& packed);

}  // namespace jgg

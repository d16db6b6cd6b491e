// See ffi/sm100.cu.
#include "nvfp4/gemm_sm100.cuh"

namespace jgg::nvfp4 {
template cudaError_t MultiplyGroups<DType::kBF16>(cudaStream_t stream, const GemmSm100& gemm,
                                                  const Workspace& at, uint8_t* base);
#ifndef JGG_SAMPLE
template cudaError_t MultiplyGroups<DType::kF32>(cudaStream_t stream, const GemmSm100& gemm,
                                                 const Workspace& at, uint8_t* base);
#endif
}  // namespace jgg::nvfp4

// Compiled once for each JGG_OUT, see CMakeLists.txt.
#include "nvfp4/gemm_sm100.cuh"

namespace jgg::nvfp4 {
template cudaError_t MultiplyGroups<JGG_OUT>(cudaStream_t stream, const GemmSm100& gemm,
                                             const Workspace& at, uint8_t* base);
}  // namespace jgg::nvfp4

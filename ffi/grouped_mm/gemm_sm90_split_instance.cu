// Compiled once for each JGG_PLANES, see CMakeLists.txt.
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {
template cudaError_t LaunchSplitGemmSm90Instance<true, JGG_PLANES>(cudaStream_t stream,
                                                                   GemmSm90& gemm,
                                                                   const OperandsSm90& operands);
template cudaError_t LaunchSplitGemmSm90Instance<false, JGG_PLANES>(cudaStream_t stream,
                                                                    GemmSm90& gemm,
                                                                    const OperandsSm90& operands);
}  // namespace jgg

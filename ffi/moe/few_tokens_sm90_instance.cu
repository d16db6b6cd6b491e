// Compiled once for each JGG_MODE and JGG_BITS, see CMakeLists.txt.
#include "moe/few_tokens_sm90.cuh"

namespace jgg {
template cudaError_t LaunchFewUpInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                 const FewTokens& experts);
template cudaError_t LaunchFewDownInstanceSm90<JGG_MODE, JGG_BITS>(cudaStream_t stream,
                                                                   const FewTokens& experts);
}  // namespace jgg

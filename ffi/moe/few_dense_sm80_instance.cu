// Compiled once for each JGG_ELEMENT, see CMakeLists.txt.
#include "moe/few_dense_sm80.cuh"

namespace jgg {
template cudaError_t LaunchFewDenseUpSm80<DType::JGG_ELEMENT>(cudaStream_t, const FewDense&, bool);
template cudaError_t LaunchFewDenseDownSm80<DType::JGG_ELEMENT>(cudaStream_t, const FewDense&,
                                                                bool);
}  // namespace jgg

// Compiled once for each JGG_MODE and JGG_X, see CMakeLists.txt.
#include "quantized/packed_sm80.cuh"

namespace jgg {
template cudaError_t LaunchPackedInstanceSm80<JGG_MODE, JGG_X>(cudaStream_t stream,
                                                               const PackedGemmSm80& packed);
}  // namespace jgg

// Compiled once for each JGG_ELEMENT, see CMakeLists.txt.
#include "fp8/cast_sm80.cuh"
#include "fp8/quantize_sm80.cuh"

namespace jgg {
template cudaError_t LaunchFp8QuantizeSm80Instance<DType::JGG_ELEMENT>(cudaStream_t,
                                                                       const Fp8QuantizeSm80&);
template cudaError_t LaunchFp8CastSm80Instance<DType::JGG_ELEMENT>(cudaStream_t,
                                                                   const Fp8CastSm80&);
}  // namespace jgg

// Compiled once for each JGG_MODE and JGG_BITS, see CMakeLists.txt.
#include "quantized/transposed_sm90.cuh"

namespace jgg {

template cudaError_t LaunchTransposedInstanceSm90<JGG_MODE, JGG_BITS>(
    cudaStream_t stream, QuantizedGemmSm90& quantized, const rules::QmmPlanSm90& plan,
    const OperandsSm90& operands);

}  // namespace jgg

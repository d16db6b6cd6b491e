#include "grouped_mm/up_and_down_sm90.cuh"

#include "common/dispatch.h"
#include "common/sample.h"

namespace jgg {

cudaError_t LaunchDenseUpAndDownSm90(cudaStream_t stream, DenseUpAndDownSm90& both,
                                     const OperandsSm90& up, const OperandsSm90& down) {
  return DispatchBool(up.r_k_major, [&](auto r) {
    constexpr bool kR = decltype(r)::value;
    if (up.dtype == DType::kBF16) {
      return LaunchDenseUpAndDownElementSm90<cutlass::bfloat16_t, kR>(stream, both, {&up, &down});
    }
    if constexpr (kSample) {
      return cudaErrorNoKernelImageForDevice;
    } else {
      return LaunchDenseUpAndDownElementSm90<cutlass::half_t, kR>(stream, both, {&up, &down});
    }
  });
}

}  // namespace jgg

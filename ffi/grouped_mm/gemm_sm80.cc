// From run-time types to one of the instances of gemm_sm80_instance.cu.
#include "grouped_mm/gemm_sm80.h"

#include "common/dispatch.h"
#include "common/sample.h"
#include "cutlass/numeric_types.h"

namespace jgg {

cudaError_t LaunchGemmSm80(cudaStream_t stream, const GemmSm80& gemm, DType dtype, bool tf32,
                           bool a_k_major, bool b_k_major) {
  auto launch = [&](auto element) {
    using Element = decltype(element);
    constexpr bool kMore =
        std::is_same_v<Element, cutlass::half_t> || std::is_same_v<Element, cutlass::tfloat32_t>;
    if constexpr (kSample && kMore) {
      return cudaErrorNoKernelImageForDevice;
    } else {
      return DispatchBool(a_k_major, [&](auto a) {
        return DispatchBool(b_k_major, [&](auto b) {
          return LaunchGemmSm80Instance<Element, a.value, b.value>(stream, gemm);
        });
      });
    }
  };
  if (dtype == DType::kF32 && tf32) return launch(cutlass::tfloat32_t{});
  return DispatchFloat(dtype, launch);
}

}  // namespace jgg

#include "fp8/quantize_sm80.h"

#include "fp8/cast_sm80.h"
#include "fp8/dispatch_dtype.h"

namespace jgg {

cudaError_t LaunchFp8QuantizeSm80(cudaStream_t stream, const Fp8QuantizeSm80& args) {
  return DispatchDType(args.dtype, [&](auto dtype) {
    return LaunchFp8QuantizeSm80Instance<dtype.value>(stream, args);
  });
}

cudaError_t LaunchFp8CastSm80(cudaStream_t stream, const Fp8CastSm80& args) {
  if (args.of_codes) return LaunchFp8CodesSm80(stream, args);
  return DispatchDType(
      args.dtype, [&](auto dtype) { return LaunchFp8CastSm80Instance<dtype.value>(stream, args); });
}

}  // namespace jgg

#include "fp8/cast_sm80.cuh"

namespace jgg {

cudaError_t LaunchFp8CodesSm80(cudaStream_t stream, const Fp8CastSm80& args) {
  fp8::CastParams cast{};
  if (cudaError_t error = fp8::MakeCastParams(stream, args, 1, &cast)) return error;
  if (cast.of.list == nullptr) cast.of.x_lines = args.rows;
  return fp8::LaunchQuantize(stream, cast, fp8::device::CodesKernel<>, args.blocks(), 1,
                             fp8::device::kSquareThreads);
}

}  // namespace jgg

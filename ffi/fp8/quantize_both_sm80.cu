#include "fp8/quantize_both_sm80.h"

#include <algorithm>

#include "fp8/device/quantize_both.cuh"
#include "fp8/dispatch_dtype.h"

namespace jgg {

using namespace fp8::device;

template <DType kOf>
static cudaError_t Launch(cudaStream_t stream, const Fp8QuantizeBothSm80& args) {
  BothParams p{};
  p.of.x = static_cast<const uint8_t*>(args.x);
  p.of.matrices = args.matrices;
  p.of.rows = args.rows;
  p.of.columns = args.columns;
  p.of.codes = static_cast<uint8_t*>(args.codes);
  p.of.scales = args.scales;
  p.turned = static_cast<uint8_t*>(args.turned);
  p.turned_scales = args.turned_scales;
  const int64_t blocks = SquaresBlocks(p.of);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(std::min<int64_t>(args.matrices, 65535)));
  BothKernel<kOf><<<grid, kSquareThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchFp8QuantizeBothSm80(cudaStream_t stream, const Fp8QuantizeBothSm80& args) {
  return DispatchDType(args.dtype, [&](auto dtype) { return Launch<dtype.value>(stream, args); });
}

}  // namespace jgg

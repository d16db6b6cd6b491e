#include "fp8/dequantize_sm80.h"

#include "common/dispatch.h"
#include "fp8/device/dequantize.cuh"
#include "fp8/dispatch_dtype.h"

namespace jgg {

using namespace fp8::device;

template <DType kTo>
static cudaError_t Launch(cudaStream_t stream, const Fp8DequantizeSm80& args) {
  constexpr int kCodes = kPieceCodes<kTo>, kOfBlock = kDequantizeThreads * kDequantizeSteps;
  DequantizeParams p{};
  p.codes = static_cast<const uint8_t*>(args.codes);
  p.scales = args.scales;
  p.out = static_cast<uint8_t*>(args.out);
  p.of_line = static_cast<uint32_t>(args.columns / kCodes);
  p.pieces = static_cast<uint32_t>(args.matrices * args.rows * p.of_line);
  p.blocks = static_cast<uint32_t>((args.columns + 127) / 128);
  p.rows = static_cast<uint32_t>(args.rows);
  p.tiles = (p.rows + 127) / 128;
  const uint32_t blocks = (p.pieces + kOfBlock - 1) / kOfBlock;
  return DispatchBool(args.e5m2, [&](auto e5m2) {
    constexpr Element kElement = e5m2.value ? Element::kE5M2 : Element::kE4M3;
    return DispatchBool(args.square, [&](auto square) {
      DequantizeKernel<kTo, kElement, square.value><<<blocks, kDequantizeThreads, 0, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchFp8DequantizeSm80(cudaStream_t stream, const Fp8DequantizeSm80& args) {
  return DispatchDType(args.dtype, [&](auto dtype) { return Launch<dtype.value>(stream, args); });
}

}  // namespace jgg

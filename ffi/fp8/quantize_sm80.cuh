// Which kernels a call of fp8_quantize takes.
#pragma once

#include <algorithm>

#include "common/dispatch.h"
#include "fp8/device/quantize_tiles.cuh"
#include "fp8/quantize_sm80.h"

namespace jgg {

namespace fp8 {

using namespace device;

using QuantizeKernel = void (*)(QuantizeParams);

inline cudaError_t LaunchQuantize(cudaStream_t stream, const QuantizeParams& p,
                                  QuantizeKernel kernel, int64_t blocks, int64_t matrices,
                                  int threads) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(std::min<int64_t>(matrices, 65535)));
  kernel<<<grid, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <DType kOf, Element kElement, bool kStochastic>
cudaError_t LaunchQuantizeKernel(cudaStream_t stream, const QuantizeParams& p,
                                 const Fp8QuantizeSm80& args) {
  if (args.square) {
    return DispatchBool(args.along_rows, [&](auto transposed) {
      return LaunchQuantize(stream, p, SquaresKernel<kOf, kElement, kStochastic, transposed.value>,
                            SquaresBlocks(p), p.matrices, kSquareThreads);
    });
  }
  if (args.along_rows) {
    return LaunchQuantize(stream, p, ColumnsKernel<kOf, kElement, kStochastic>, ColumnsBlocks(p),
                          p.matrices, kSpanThreads);
  }
  return DispatchBool(p.columns % kBlock != 0, [&](auto cut) {
    return LaunchQuantize(stream, p, RowsKernel<kOf, kElement, kStochastic, cut.value>,
                          RowsBlocks<kOf>(p), 1, kRowsThreads);
  });
}

}  // namespace fp8

template <DType kOf>
cudaError_t LaunchFp8QuantizeSm80Instance(cudaStream_t stream, const Fp8QuantizeSm80& args) {
  using namespace fp8;
  QuantizeParams p{};
  p.x = static_cast<const uint8_t*>(args.x);
  p.matrices = args.matrices;
  p.rows = args.rows;
  p.columns = args.columns;
  p.along = args.along;
  p.blocks = args.blocks();
  p.power_of_two = args.power_of_two;
  p.seed = args.seed;
  p.codes = static_cast<uint8_t*>(args.codes);
  p.scales = args.scales;
  if (args.sizes != nullptr) {
    const auto groups = static_cast<int32_t>(args.groups);
    auto* starts = static_cast<int32_t*>(args.workspace);
    int32_t* tiles = starts + groups + 1;
    auto* of_tiles = reinterpret_cast<TileRows*>(tiles + groups + 1);
    const auto count = static_cast<int32_t>(args.along_rows ? p.blocks : 0);
    GroupsKernel<<<1, kScanThreads, 0, stream>>>(args.sizes, groups, static_cast<int32_t>(p.rows),
                                                 starts, tiles, of_tiles, count);
    if (cudaError_t error = cudaGetLastError()) return error;
    p.inside = starts + groups;
    if (args.along_rows) p.groups = of_tiles;
  }
  return DispatchBool(args.e5m2, [&](auto e5m2) {
    constexpr Element kElement = e5m2.value ? Element::kE5M2 : Element::kE4M3;
    return DispatchBool(args.seed != nullptr, [&](auto stochastic) {
      return LaunchQuantizeKernel<kOf, kElement, stochastic.value>(stream, p, args);
    });
  });
}

}  // namespace jgg

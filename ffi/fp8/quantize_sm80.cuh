// Which kernels a call of fp8_quantize takes.
#pragma once

#include "common/dispatch.h"
#include "fp8/device/quantize_lines.cuh"
#include "fp8/launch_sm80.cuh"
#include "fp8/quantize_sm80.h"

namespace jgg {

namespace fp8 {

// Along one axis.
template <DType kOf, Element kElement, bool kStochastic>
cudaError_t LaunchQuantizeKernel(cudaStream_t stream, const QuantizeParams& p,
                                 const Fp8QuantizeSm80& args) {
  if (args.square) {
    return DispatchBool(args.along_rows(), [&](auto transposed) {
      return LaunchQuantize(stream, p, SquaresKernel<kOf, kElement, kStochastic, transposed.value>,
                            SquaresBlocks(p), p.matrices, kSquareThreads);
    });
  }
  if (args.along_rows()) {
    return DispatchBool(p.list != nullptr, [&](auto by_list) {
      return LaunchQuantize(stream, p, ColumnsKernel<kOf, kElement, kStochastic, by_list.value>,
                            ColumnsBlocks(p), p.matrices, kSpanThreads);
    });
  }
  return DispatchBool(p.columns % kBlock != 0, [&](auto cut) {
    return LaunchQuantize(stream, p, RowsKernel<kOf, kElement, kStochastic, cut.value>,
                          RowsBlocks<kOf>(p), 1, kRowsThreads);
  });
}

template <DType kOf>
cudaError_t LaunchBothKernel(cudaStream_t stream, const QuantizeParams& by_rows,
                             const QuantizeParams& by_columns, bool square) {
  if (square) {
    const BothParams p{by_rows, by_columns.codes, by_columns.scales};
    return LaunchQuantize(stream, p, BothKernel<kOf>, SquaresBlocks(p.of), p.of.matrices,
                          kSquareThreads);
  }
  if constexpr (kOf == DType::kBF16) {
    const LinesParams p{by_rows, by_columns};
    return LaunchQuantize(stream, p, LinesKernel<kOf>, LinesBlocks(p), 1, kSquareThreads);
  }
  return cudaErrorNotSupported;
}

}  // namespace fp8

template <DType kOf>
cudaError_t LaunchFp8QuantizeSm80Instance(cudaStream_t stream, const Fp8QuantizeSm80& args) {
  using namespace fp8;
  const auto params = [&](const Fp8Codes& to, int64_t along) {
    QuantizeParams p = ParamsOf(to, along);
    p.x = static_cast<const uint8_t*>(args.x);
    p.matrices = args.matrices;
    p.rows = args.rows;
    p.columns = args.columns;
    p.power_of_two = args.power_of_two;
    p.list = args.list;
    p.x_lines = args.x_lines;
    if (p.list != nullptr) p.slice = SpansOfSlice(p, Size(kOf));
    return p;
  };
  QuantizeParams by_rows = params(args.by_rows, args.columns);
  QuantizeParams by_columns = params(args.by_columns, args.along);
  QuantizeParams& p = args.along_rows() ? by_columns : by_rows;
  if (args.sizes != nullptr) {
    const int64_t tiles = args.along_rows() ? p.blocks : 0;
    if (cudaError_t error =
            FindGroups(stream, args.sizes, args.groups, args.workspace, &p, tiles)) {
      return error;
    }
  }
  if (args.both()) return LaunchBothKernel<kOf>(stream, by_rows, by_columns, args.square);
  return DispatchBool(args.e5m2, [&](auto e5m2) {
    constexpr Element kElement = e5m2.value ? Element::kE5M2 : Element::kE4M3;
    return DispatchBool(p.seed != nullptr, [&](auto stochastic) {
      return LaunchQuantizeKernel<kOf, kElement, stochastic.value>(stream, p, args);
    });
  });
}

}  // namespace jgg

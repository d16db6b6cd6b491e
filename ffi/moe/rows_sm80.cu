#include "moe/rows_sm80.h"

#include <type_traits>

#include "common/sample.h"
#include "moe/device/rows.cuh"
#include "moe/device/some_rows.cuh"

namespace jgg {
namespace {

template <DType kOf>
using Of = std::integral_constant<DType, kOf>;

// Calls function(element type, type of the result or the cotangent).
template <typename Function>
cudaError_t DispatchDTypes(DType of, DType other, Function function) {
  if (of == DType::kF32) return function(Of<DType::kF32>{}, Of<DType::kF32>{});
  if (of == DType::kBF16) {
    return other == DType::kF32 ? function(Of<DType::kBF16>{}, Of<DType::kF32>{})
                                : function(Of<DType::kBF16>{}, Of<DType::kBF16>{});
  }
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return other == DType::kF32 ? function(Of<DType::kF16>{}, Of<DType::kF32>{})
                                : function(Of<DType::kF16>{}, Of<DType::kF16>{});
  }
}

template <typename Params>
cudaError_t Launch(cudaStream_t stream, void (*kernel)(Params), const Params& params) {
  const RowsGrid& grid = params.grid;
  if (grid.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>(grid.blocks);
  kernel<<<blocks, static_cast<unsigned>(grid.lanes * grid.tokens), 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t dispatch_sm80(cudaStream_t stream, const DispatchArgs& args) {
  // Pieces of a token on their way at a time. If each has few copies, a thread takes more pieces.
  const auto launch = [&](auto dtype, auto weighted, auto each) {
    return Launch(stream, device::DispatchKernel<dtype.value, weighted.value, each.value>,
                  device::DispatchParams{args.pairs, MakeRowsGrid(args.pairs, each.value),
                                         static_cast<const uint4*>(args.x), args.weight,
                                         static_cast<uint4*>(args.out), args.clears_rest});
  };
  const auto with_each = [&](auto dtype, auto weighted) {
    return args.pairs.k <= 2 ? launch(dtype, weighted, std::integral_constant<int, 2>{})
                             : launch(dtype, weighted, std::integral_constant<int, 1>{});
  };
  // Copies need no element type.
  if (!args.weight) return with_each(Of<DType::kF32>{}, std::false_type{});
  return DispatchDTypes(args.dtype, args.dtype,
                        [&](auto dtype, auto) { return with_each(dtype, std::true_type{}); });
}

cudaError_t combine_sm80(cudaStream_t stream, const CombineArgs& args) {
  return DispatchDTypes(args.dtype, args.out_dtype, [&](auto dtype, auto out) {
    // Eight pieces of a thread on their way at a time.
    const auto launch = [&](auto at_once) {
      constexpr int kEach = 8 / at_once.value;
      return Launch(
          stream, device::CombineKernel<dtype.value, out.value, at_once.value, kEach>,
          device::CombineParams{args.pairs, MakeRowsGrid(args.pairs, kEach),
                                static_cast<const uint4*>(args.rows), args.weight, args.out});
    };
    if (args.pairs.k <= 2) return launch(std::integral_constant<int, 2>{});
    if (args.pairs.k <= 4) return launch(std::integral_constant<int, 4>{});
    return launch(std::integral_constant<int, 8>{});
  });
}

cudaError_t some_rows_sm80(cudaStream_t stream, const SomeRows& rows) {
  if (rows.tokens == 0) return cudaSuccess;
  device::SomeRowsKernel<<<static_cast<unsigned>(rows.tokens), device::kSomeThreads, 0, stream>>>(
      rows);
  return cudaGetLastError();
}

cudaError_t combine_backward_sm80(cudaStream_t stream, const CombineBackwardArgs& args) {
  return DispatchDTypes(args.dtype, args.ct_dtype, [&](auto dtype, auto ct) {
    const auto launch = [&](auto at_once) {
      return Launch(stream, device::CombineBackwardKernel<dtype.value, ct.value, at_once.value>,
                    device::CombineBackwardParams{args.pairs, MakeRowsGrid(args.pairs, 0), args.ct,
                                                  static_cast<const uint4*>(args.rows), args.weight,
                                                  args.drows, args.dweight});
    };
    if (args.pairs.k <= 2) return launch(std::integral_constant<int, 2>{});
    if (args.pairs.k <= 4) return launch(std::integral_constant<int, 4>{});
    return launch(std::integral_constant<int, 8>{});
  });
}

}  // namespace jgg

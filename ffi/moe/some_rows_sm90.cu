#include "moe/some_rows_sm90.h"

#include "common/launch_early.h"
#include "grouped_mm/device/primitives_sm90.cuh"
#include "moe/device/some_rows.cuh"

namespace jgg {

cudaError_t LaunchSomeRowsSm90(cudaStream_t stream, const SomeRows& rows) {
  if (rows.tokens == 0) return cudaSuccess;
  device::SomeRowsKernel<<<static_cast<unsigned>(rows.tokens), device::kSomeThreads, 0, stream>>>(
      rows);
  return cudaGetLastError();
}

template <DType kOf, DType kOut>
static cudaError_t LaunchSum(cudaStream_t stream, const CombineArgs& args) {
  const device::CombineParams params{args.pairs, MakeRowsGrid(args.pairs, 1),
                                     static_cast<const uint4*>(args.rows), args.weight, args.out};
  const RowsGrid& grid = params.grid;
  return LaunchEarly(device::SumSomeRowsKernel<kOf, kOut>, dim3(static_cast<unsigned>(grid.blocks)),
                     grid.lanes * grid.tokens, 0, stream, params);
}

cudaError_t LaunchSumSomeRowsSm90(cudaStream_t stream, const CombineArgs& args) {
  if (args.pairs.tokens == 0) return cudaSuccess;
  const bool wide = args.out_dtype == DType::kF32;
  if (args.dtype == DType::kBF16) {
    return wide ? LaunchSum<DType::kBF16, DType::kF32>(stream, args)
                : LaunchSum<DType::kBF16, DType::kBF16>(stream, args);
  }
  return wide ? LaunchSum<DType::kF16, DType::kF32>(stream, args)
              : LaunchSum<DType::kF16, DType::kF16>(stream, args);
}

}  // namespace jgg

// Host side of the kernels of a few tokens' experts with 16-bit weights: launch.
#pragma once

#include <type_traits>

#include "common/launch_early.h"
#include "moe/device/few_dense_sm80.cuh"
#include "moe/few_dense_sm80.h"
#include "moe/few_launch.cuh"

namespace jgg {

// Whether this device's code of a kernel waits for the one before it. PTX of compute
// capability 8.0, which newer GPUs may take, does not.
template <typename Kernel>
cudaError_t Waits(Kernel kernel, bool* waits) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  *waits = error == cudaSuccess && attributes.ptxVersion >= 90;
  return error;
}

template <DType kX, bool kTransposed, bool kGated>
cudaError_t LaunchFewDenseUpOf(cudaStream_t stream, const FewDense& dense) {
  const FewTokens& experts = dense.experts;
  const auto kernel = device::FewDenseUpSm80Kernel<kX, kTransposed, kGated, device::FewFinish>;
  const int bytes = device::FewDenseUpBytes(experts);
  if (cudaError_t error = AllowBytes(kernel, bytes)) return error;
  constexpr int kColumns = device::kDenseColumns / (kGated ? 2 : 1);
  const dim3 blocks(static_cast<unsigned>((experts.f + kColumns - 1) / kColumns),
                    static_cast<unsigned>(experts.tokens * experts.k));
  kernel<<<blocks, device::kDenseThreads, bytes, stream>>>(dense);
  return cudaGetLastError();
}

template <DType kX>
cudaError_t LaunchFewDenseUpSm80(cudaStream_t stream, const FewDense& dense, bool transposed) {
  const bool gated = IsGated(dense.experts.activation);
  if (transposed) {
    return gated ? LaunchFewDenseUpOf<kX, true, true>(stream, dense)
                 : LaunchFewDenseUpOf<kX, true, false>(stream, dense);
  }
  return gated ? LaunchFewDenseUpOf<kX, false, true>(stream, dense)
               : LaunchFewDenseUpOf<kX, false, false>(stream, dense);
}

template <DType kX, bool kTransposed, int kParts>
cudaError_t LaunchFewDenseDownOf(cudaStream_t stream, const FewDense& dense) {
  const FewTokens& experts = dense.experts;
  const auto kernel = device::FewDenseDownSm80Kernel<kX, kTransposed, kParts, device::FewFinish>;
  const int bytes = device::FewDenseDownBytes(experts);
  if (cudaError_t error = AllowBytes(kernel, bytes)) return error;
  bool waits = false;
  if (cudaError_t error = Waits(kernel, &waits)) return error;
  // Blocks of all tokens first, so that those which read the same weights do so at one time.
  constexpr int kColumns = device::kDenseColumns / kParts;
  const dim3 blocks(static_cast<unsigned>(experts.tokens),
                    static_cast<unsigned>((experts.d + kColumns - 1) / kColumns));
  if (waits) return LaunchEarly(kernel, blocks, device::kDenseThreads, bytes, stream, dense);
  kernel<<<blocks, device::kDenseThreads, bytes, stream>>>(dense);
  return cudaGetLastError();
}

template <DType kX, bool kTransposed>
cudaError_t LaunchFewDenseDownIn(cudaStream_t stream, const FewDense& dense) {
  switch (rules::FewDenseColumns(dense.experts.tokens, dense.experts.d)) {
    case 64: return LaunchFewDenseDownOf<kX, kTransposed, 1>(stream, dense);
    case 32: return LaunchFewDenseDownOf<kX, kTransposed, 2>(stream, dense);
    default: return LaunchFewDenseDownOf<kX, kTransposed, 4>(stream, dense);
  }
}

template <DType kX>
cudaError_t LaunchFewDenseDownSm80(cudaStream_t stream, const FewDense& dense, bool transposed) {
  return transposed ? LaunchFewDenseDownIn<kX, true>(stream, dense)
                    : LaunchFewDenseDownIn<kX, false>(stream, dense);
}

}  // namespace jgg

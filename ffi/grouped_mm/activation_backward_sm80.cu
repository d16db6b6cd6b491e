// The kernel of an activation's backward pass: any GPU of compute capability 8.0 or newer. A warp
// has a row, a lane 8 neighbouring columns at a time: it reads 32 or 48 bytes and writes as many.
#include <algorithm>

#include "common/arch.h"
#include "grouped_mm/activation_backward.h"
#include "grouped_mm/device/activation.cuh"

namespace jgg {
namespace device {

constexpr int kBackwardThreads = 256, kBackwardPiece = 8;

template <typename T>
__device__ void LoadPiece(const void* from, int64_t at, float (&values)[kBackwardPiece]) {
  const uint4 four = __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at));
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < kBackwardPiece; ++i) {
    const uint16_t half = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    values[i] = static_cast<float>(T::bitcast(half));
  }
}

template <typename T>
__device__ void StorePiece(void* to, int64_t at, const float (&values)[kBackwardPiece]) {
  *reinterpret_cast<uint4*>(static_cast<T*>(to) + at) =
      make_uint4(Pack<T>(values[0], values[1]), Pack<T>(values[2], values[3]),
                 Pack<T>(values[4], values[5]), Pack<T>(values[6], values[7]));
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kBackwardThreads)
    ActivationBackwardKernel(const ActivationBackwardArgs args) {
  constexpr bool kGated = IsGated(kActivation);
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * (kBackwardThreads / 32);
  int64_t rows = args.rows;
  if (args.live_rows != nullptr) rows = min(rows, int64_t{__ldg(args.live_rows)});
  for (int64_t row = int64_t{blockIdx.x} * (kBackwardThreads / 32) + threadIdx.x / 32; row < rows;
       row += step) {
    const float scale = args.row_scale == nullptr ? 1.0f : __ldg(args.row_scale + row);
    const int64_t h_row = row * args.n, d_row = row * args.columns;
    float sum = 0.0f;
#pragma unroll 2
    for (int64_t column = lane * kBackwardPiece; column < args.columns;
         column += 32 * kBackwardPiece) {
      float x[kBackwardPiece], up[kBackwardPiece], d[kBackwardPiece], value[kBackwardPiece];
      LoadPiece<T>(args.h, h_row + column, x);
      if constexpr (kGated) LoadPiece<T>(args.h, h_row + args.columns + column, up);
      LoadPiece<T>(args.d, d_row + column, d);
#pragma unroll
      for (int i = 0; i < kBackwardPiece; ++i) {
        const Activated f = Differentiate<kActivation>(x[i], kGated ? up[i] : 0.0f);
        // What was multiplied is the rounded activation.
        value[i] = static_cast<float>(T(f.value));
        sum += d[i] * value[i];
        value[i] *= scale;
        x[i] = d[i] * scale * f.by_x;
        if (kGated) up[i] = d[i] * scale * f.by_up;
      }
      StorePiece<T>(args.dh, h_row + column, x);
      if constexpr (kGated) StorePiece<T>(args.dh, h_row + args.columns + column, up);
      if (args.activated != nullptr) StorePiece<T>(args.activated, d_row + column, value);
    }
    if (args.row_sums == nullptr) continue;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) args.row_sums[row] = sum;
  }
}

}  // namespace device

template <typename T, Activation kActivation>
static void Launch(cudaStream_t stream, const ActivationBackwardArgs& args) {
  constexpr int kRows = device::kBackwardThreads / 32;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((args.rows + kRows - 1) / kRows, 64 * Processors()));
  device::ActivationBackwardKernel<T, kActivation>
      <<<blocks, device::kBackwardThreads, 0, stream>>>(args);
}

template <typename T>
static cudaError_t LaunchActivation(cudaStream_t stream, const ActivationBackwardArgs& args) {
  if (args.activation == Activation::kNone) return cudaErrorInvalidValue;
  const auto launch = [&](auto of) { Launch<T, decltype(of)::kActivation>(stream, args); };
  if (IsGated(args.activation)) {
    DispatchActivation<true>(args.activation, launch);
  } else {
    DispatchActivation<false>(args.activation, launch);
  }
  return cudaGetLastError();
}

cudaError_t ActivationBackward(cudaStream_t stream, const ActivationBackwardArgs& args) {
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  if (args.dtype == DType::kBF16) return LaunchActivation<cutlass::bfloat16_t>(stream, args);
#ifndef JGG_SAMPLE
  return LaunchActivation<cutlass::half_t>(stream, args);
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg

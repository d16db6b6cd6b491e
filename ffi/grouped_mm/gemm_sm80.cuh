// Host side of the sm80 kernel: tile shapes, choice between them, launch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "grouped_mm/device/gemm_sm80.cuh"
#include "grouped_mm/gemm_sm80.h"

namespace jgg {

// Launch one configuration on every multiprocessor, or on as many as have work.
template <typename Config>
cudaError_t LaunchConfig(cudaStream_t stream, const GemmSm80& gemm) {
  constexpr auto kernel = device::GemmSm80Kernel<Config>;
  constexpr int kBytes = sizeof(typename Config::SharedMemory);
  // Blocks that fit the device, asked once per device.
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  int blocks = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (blocks == 0) {
    int processors = 0, per_processor = 0;
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
      return error;
    }
    if (cudaError_t error =
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) {
      return error;
    }
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &per_processor, kernel, Config::kThreads, kBytes)) {
      return error;
    }
    blocks = processors * std::max(per_processor, 1);
    if (device < 64) known[device].store(blocks, std::memory_order_relaxed);
  }
  // At most this many tiles exist, whatever the sizes: each segment may begin and end a tile, and
  // have a gap before it.
  const bool mm = gemm.product == GemmSm80::Product::kMm;
  const int64_t columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
  const int64_t tile_columns = IsGated(gemm.epilogue.activation) ? Config::kN / 2 : Config::kN;
  const int64_t n_tiles = (columns + tile_columns - 1) / tile_columns;
  const int64_t m_tiles = mm ? gemm.rows_y / Config::kM + 3 * (gemm.metadata.count + 1)
                             : (gemm.m + Config::kM - 1) / Config::kM * gemm.groups;
  const int64_t tiles = m_tiles * n_tiles;
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (tiles == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(std::min<int64_t>(tiles, blocks)), Config::kThreads, kBytes,
           stream>>>(gemm);
  return cudaGetLastError();
}

// The rows of the result that an average segment has; what a tile's height is chosen by.
inline int64_t TypicalRows(const GemmSm80& gemm) {
  if (gemm.product == GemmSm80::Product::kWgrad) return gemm.m;
  return (gemm.rows_y + gemm.metadata.count - 1) / std::max<int64_t>(gemm.metadata.count, 1);
}

template <typename Element, bool kAKMajor, bool kBKMajor>
cudaError_t LaunchGemmSm80Instance(cudaStream_t stream, const GemmSm80& gemm) {
  constexpr bool kA = kAKMajor, kB = kBKMajor;
  const int64_t rows = TypicalRows(gemm);
  if constexpr (std::is_same_v<Element, float>) {
    if (rows <= 16) {
      using Ops = device::FloatOps<kA, kB, 16, 128, 32, 4, 32>;
      return LaunchConfig<device::GemmConfig<float, kA, kB, 16, 128, 32, 3, 3, Ops>>(stream, gemm);
    }
    using Ops = device::FloatOps<kA, kB, 128, 128, 16, 16, 8>;
    return LaunchConfig<device::GemmConfig<float, kA, kB, 128, 128, 16, 4, 2, Ops>>(stream, gemm);
  } else {
    constexpr int kWide = 128 / sizeof(Element), kNarrow = 64 / sizeof(Element);
    if (rows <= 16) {
      using Ops = device::TensorOps<Element, kA, kB, 16, 128, kWide, 1, 4>;
      return LaunchConfig<device::GemmConfig<Element, kA, kB, 16, 128, kWide, 3, 3, Ops>>(stream,
                                                                                         gemm);
    }
    using Ops = device::TensorOps<Element, kA, kB, 128, 128, kNarrow, 2, 2>;
    return LaunchConfig<device::GemmConfig<Element, kA, kB, 128, 128, kNarrow, 4, 2, Ops>>(stream,
                                                                                          gemm);
  }
}

}  // namespace jgg

// Host side of the Hopper kernel: tile shapes, choice between them, launch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "common/dispatch.h"
#include "grouped_mm/device/gemm_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg {

// Launch one configuration on as many clusters as the device holds at a time, which share out the
// tiles.
template <typename Config>
cudaError_t LaunchConfigSm90(cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands) {
  constexpr auto kernel = device::GemmSm90Kernel<Config>;
  constexpr int kBytes = sizeof(typename Config::SharedMemory);
  static_assert(kBytes <= 227 * 1024);

  gemm.l_k_major = Config::kLKMajor;
  gemm.r_k_major = Config::kRKMajor;
  TensorMapSpec l = operands.l, r = operands.r;
  l.box_lines = Config::kLKMajor ? Config::kChunkL : device::kSliceSm90;
  r.box_lines = 64;
  if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  if (cudaError_t error = EncodeTensorMap(r, &gemm.r_map)) return error;

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.blockDim = Config::kThreads;
  launch.dynamicSmemBytes = kBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;

  // Clusters that fit the device, asked once per device.
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  int clusters = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (clusters == 0) {
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
      return error;
    }
    launch.gridDim = Config::kCluster;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch)) {
      return error;
    }
    clusters = std::max(clusters, 1);
    if (device < 64) known[device].store(clusters, std::memory_order_relaxed);
  }
  // At most this many tiles exist, whatever the sizes: each segment may begin and end a tile, and
  // have a gap before it.
  const bool gated = IsGated(gemm.epilogue.activation);
  const int64_t columns = gated ? gemm.n / 2 : gemm.n;
  const int64_t tile_columns = (gated ? 128 : 128 * Config::kBlocks) * Config::kCluster;
  const int64_t m_tiles =
      gemm.wgrad ? (gemm.m + Config::kRows - 1) / Config::kRows * static_cast<int64_t>(gemm.groups)
                 : gemm.rows_y / Config::kRows + 3 * (gemm.metadata.count + 1);
  const int64_t tiles = m_tiles * ((columns + tile_columns - 1) / tile_columns);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (tiles == 0) return cudaSuccess;
  if (std::getenv("JGG_DEBUG")) std::fprintf(stderr, "clusters %d x %d, bytes %d\n", clusters, Config::kCluster, kBytes);
  const char* b = std::getenv("JGG_BAND");
  gemm.band = b ? std::atoi(b) : 8;
  const char* sk = std::getenv("JGG_SKEW");
  gemm.skew = sk ? std::atoi(sk) : 0;
  launch.gridDim = static_cast<unsigned>(std::min<int64_t>(tiles, clusters)) * Config::kCluster;
  return cudaLaunchKernelEx(&launch, kernel, static_cast<const GemmSm90&>(gemm));
}

// Rows of the result that a tile may have, going by what segments have on average.
inline int64_t TypicalRowsSm90(const GemmSm90& gemm) {
  if (gemm.wgrad) return gemm.m;
  return (gemm.rows_y + gemm.metadata.count - 1) / std::max<int64_t>(gemm.metadata.count, 1);
}

template <typename Element, bool kLKMajor>
cudaError_t LaunchGemmSm90Instance(cudaStream_t stream, GemmSm90& gemm,
                                   const OperandsSm90& operands) {
  return DispatchBool(operands.r_k_major, [&](auto r) {
    constexpr bool kR = decltype(r)::value;
    auto launch = [&](auto rows, auto blocks, auto stages, auto cluster) {
      return LaunchConfigSm90<device::GemmSm90Config<Element, kLKMajor, kR, rows.value,
                                                     blocks.value, stages.value, cluster.value>>(
          stream, gemm, operands);
    };
    using device::Constant;
    const bool gated = IsGated(gemm.epilogue.activation);
    const int64_t rows = TypicalRowsSm90(gemm);
    int tile = gated ? (rows <= 32 ? 4 : 2) : rows <= 32 ? 3 : rows <= 64 ? 1 : rows <= 128 ? 2 : 0;
    if (const char* forced = std::getenv("JGG_TILE90")) tile = std::atoi(forced);
    if constexpr (kLKMajor) {
      if (tile == 3) return launch(Constant<32>{}, Constant<1>{}, Constant<10>{}, Constant<1>{});
      if (tile == 7) return launch(Constant<288>{}, Constant<1>{}, Constant<4>{}, Constant<2>{});
      if (tile == 8) return launch(Constant<288>{}, Constant<1>{}, Constant<4>{}, Constant<1>{});
      if (tile == 4) return launch(Constant<32>{}, Constant<2>{}, Constant<5>{}, Constant<1>{});
    }
    if (tile == 1) return launch(Constant<64>{}, Constant<1>{}, Constant<8>{}, Constant<1>{});
    if (tile == 2) return launch(Constant<128>{}, Constant<2>{}, Constant<4>{}, Constant<1>{});
    if (tile == 5) return launch(Constant<256>{}, Constant<1>{}, Constant<4>{}, Constant<2>{});
    if (tile == 6) return launch(Constant<128>{}, Constant<2>{}, Constant<4>{}, Constant<2>{});
    return launch(Constant<256>{}, Constant<1>{}, Constant<4>{}, Constant<1>{});
  });
}

}  // namespace jgg

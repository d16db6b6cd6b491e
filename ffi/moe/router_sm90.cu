#include "moe/router_sm90.h"

#include <array>
#include <atomic>

#include "moe/device/router_sm90.cuh"

namespace jgg {

// Blocks of a cluster that a kernel has, by device: bytes of shared memory plus 1, and the blocks,
// as one number; 0 until asked.
using KnownClusters = std::array<std::atomic<uint64_t>, 64>;

static cudaLaunchConfig_t Config(cudaStream_t stream, int clusters, int blocks, int bytes,
                                 cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * blocks));
  config.blockDim = dim3(kRouterThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// 16 blocks where the device holds such a cluster, else 8, which every Hopper GPU does.
static cudaError_t ClusterBlocks(const void* kernel, int bytes, KnownClusters& known, int* blocks) {
  int device = 0, most_bytes = 0, clusters = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const uint64_t last = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (last >> 32 == static_cast<uint64_t>(bytes) + 1) {
    *blocks = static_cast<int>(last & 0xffffffff);
    return cudaSuccess;
  }
  if (cudaError_t error =
          cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return error;
  }
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes)) {
    return error;
  }
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) {
    return error;
  }
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = Config(nullptr, 1, 16, bytes, &attribute);
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // it only says that 16 are too many
    clusters = 0;
  }
  *blocks = clusters > 0 ? 16 : 8;
  const uint64_t asked = (static_cast<uint64_t>(bytes) + 1) << 32 | static_cast<uint32_t>(*blocks);
  if (device < 64) known[device].store(asked, std::memory_order_relaxed);
  return cudaSuccess;
}

template <bool kBFloat16, bool kTransposed, int kTokens, int kItems>
static cudaError_t LaunchItems(cudaStream_t stream, RouterArgs args) {
  constexpr auto kernel = device::RouterSm90Kernel<kBFloat16, kTransposed, kTokens, kItems>;
  static KnownClusters known;
  const auto share = [&](int blocks) {
    args.part = (args.d + 8 * blocks - 1) / (8 * blocks) * 8;
    return RouterMemoryOf(kTransposed, kRouterThreads, kTokens, args.part, args.choice.experts,
                          blocks)
        .bytes();
  };
  int bytes = share(16), blocks = 0;
  if (cudaError_t error =
          ClusterBlocks(reinterpret_cast<const void*>(kernel), bytes, known, &blocks)) {
    return error;
  }
  if (blocks != 16) bytes = share(blocks);
  cudaLaunchAttribute attribute;
  const int clusters = (args.choice.tokens + kTokens - 1) / kTokens;
  const cudaLaunchConfig_t config = Config(stream, clusters, blocks, bytes, &attribute);
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <bool kBFloat16, bool kTransposed, int kTokens>
static cudaError_t LaunchTokens(cudaStream_t stream, const RouterArgs& args) {
  if (args.choice.experts <= 128) {
    return LaunchItems<kBFloat16, kTransposed, kTokens, 4>(stream, args);
  }
  if (args.choice.experts <= 256) {
    return LaunchItems<kBFloat16, kTransposed, kTokens, 8>(stream, args);
  }
  return LaunchItems<kBFloat16, kTransposed, kTokens, 16>(stream, args);
}

// Each token has a cluster: w is read from memory once, and there is little to multiply.
template <bool kBFloat16, bool kTransposed>
static cudaError_t Launch(cudaStream_t stream, const RouterArgs& args) {
  return LaunchTokens<kBFloat16, kTransposed, 1>(stream, args);
}

cudaError_t LaunchRouterSm90(cudaStream_t stream, const RouterArgs& args, bool bfloat16_w,
                             bool transposed) {
  if (bfloat16_w) {
    return transposed ? Launch<true, true>(stream, args) : Launch<true, false>(stream, args);
  }
  return transposed ? Launch<false, true>(stream, args) : Launch<false, false>(stream, args);
}

}  // namespace jgg

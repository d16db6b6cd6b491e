#include "moe/router_sm90.h"

#include "common/blocks_that_fit.h"
#include "moe/device/router_sm90.cuh"

namespace jgg {

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
static cudaError_t ClusterBlocks(const void* kernel, int bytes, KnownBlocks& known, int* blocks) {
  return AskedOnce(known, bytes, blocks, [&](int) {
    if (cudaError_t error = AllowAllSharedMemory(kernel)) return error;
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) {
      return error;
    }
    int clusters = 0;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = Config(nullptr, 1, 16, bytes, &attribute);
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      cudaGetLastError();  // it only says that 16 are too many
      clusters = 0;
    }
    *blocks = clusters > 0 ? 16 : 8;
    return cudaSuccess;
  });
}

template <bool kBFloat16, bool kTransposed, int kItems, int kTokens>
static cudaError_t LaunchTokens(cudaStream_t stream, RouterArgs args) {
  constexpr auto kernel = device::RouterSm90Kernel<kBFloat16, kTransposed, kItems, kTokens>;
  static KnownBlocks known;
  const auto share = [&](int blocks) {
    args.part = (args.d + 8 * blocks - 1) / (8 * blocks) * 8;
    return RouterMemoryOf(kTransposed, kRouterThreads, args.part, args.choice.experts, blocks,
                          kTokens)
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

template <bool kBFloat16, bool kTransposed, int kItems>
static cudaError_t LaunchItems(cudaStream_t stream, const RouterArgs& args) {
  return args.choice.tokens == 1
             ? LaunchTokens<kBFloat16, kTransposed, kItems, 1>(stream, args)
             : LaunchTokens<kBFloat16, kTransposed, kItems, kRouterTokens>(stream, args);
}

template <bool kBFloat16, bool kTransposed>
static cudaError_t Launch(cudaStream_t stream, const RouterArgs& args) {
  if (args.choice.experts <= 128) return LaunchItems<kBFloat16, kTransposed, 4>(stream, args);
  if (args.choice.experts <= 256) return LaunchItems<kBFloat16, kTransposed, 8>(stream, args);
  return LaunchItems<kBFloat16, kTransposed, 16>(stream, args);
}

cudaError_t LaunchRouterSm90(cudaStream_t stream, const RouterArgs& args, bool bfloat16_w,
                             bool transposed) {
  if (bfloat16_w) {
    return transposed ? Launch<true, true>(stream, args) : Launch<true, false>(stream, args);
  }
  return transposed ? Launch<false, true>(stream, args) : Launch<false, false>(stream, args);
}

}  // namespace jgg

// Host side of device/up_and_down_sm90.cuh.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "grouped_mm/device/up_and_down_sm90.cuh"
#include "grouped_mm/gemm_sm90.cuh"

namespace jgg {

// Launch a kernel on as many blocks as the device holds at a time, which share out so many tiles.
template <typename Config, auto kernel, typename Both>
cudaError_t LaunchBothSm90(cudaStream_t stream, int64_t tiles, const Both& both) {
  constexpr int kBytes = sizeof(typename Config::SharedMemory);
  static_assert(kBytes <= 227 * 1024);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (tiles == 0) return cudaSuccess;
  static std::array<std::atomic<int>, 64> all_known{};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  int blocks = device < 64 ? all_known[device].load(std::memory_order_relaxed) : 0;
  if (blocks == 0) {
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
      return error;
    }
    int of_each = 0, processors = 0;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &of_each, kernel, Config::kThreads, kBytes)) {
      return error;
    }
    if (cudaError_t error =
            cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) {
      return error;
    }
    blocks = std::max(of_each, 1) * processors;
    if (device < 64) all_known[device].store(blocks, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(std::min<int64_t>(tiles, blocks)), Config::kThreads, kBytes,
           stream>>>(both);
  return cudaGetLastError();
}

// Weights of 16 bits, which are K-major or not in both products.
template <typename Element, bool kRKMajor>
cudaError_t LaunchDenseUpAndDownElementSm90(cudaStream_t stream, DenseUpAndDownSm90& both,
                                            const OperandsSm90* const (&operands)[2]) {
  using Config = device::DenseUpAndDownConfig<GatedRows32Sm90<DenseSm90<Element, true, kRKMajor>>>;
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    GemmSm90& gemm = both.products[i];
    gemm.l_k_major = true;
    gemm.r_k_major = kRKMajor;
    if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, *operands[i])) return error;
    // Threads store: what a tensor copy has stored, other blocks could not read at once.
    gemm.stores_boxes = gemm.store_warp = false;
    tiles += MostTilesSm90<Config>(gemm);
  }
  return LaunchBothSm90<Config, device::DenseUpAndDownSm90Kernel<Config>>(stream, tiles, both);
}

}  // namespace jgg

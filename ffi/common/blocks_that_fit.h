// How many thread blocks of a kernel the current device holds at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "common/arch.h"

namespace jgg {

// The answers for one kernel, by device: bytes of shared memory plus 1, and blocks, as one number;
// 0 until asked.
using KnownBlocks = std::array<std::atomic<uint64_t>, 64>;

// ask(device) sets `blocks`; asked once, or whenever `bytes`, of dynamic shared memory, changes.
template <typename Ask>
cudaError_t AskedOnce(KnownBlocks& known, int bytes, int* blocks, Ask ask) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const uint64_t last = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (last >> 32 == static_cast<uint64_t>(bytes) + 1) {
    *blocks = static_cast<int>(last & 0xffffffff);
    return cudaSuccess;
  }
  if (cudaError_t error = ask(device)) return error;
  const uint64_t asked = (static_cast<uint64_t>(bytes) + 1) << 32 | static_cast<uint32_t>(*blocks);
  if (device < 64) known[device].store(asked, std::memory_order_relaxed);
  return cudaSuccess;
}

inline cudaError_t AllowAllSharedMemory(const void* kernel, int device) {
  int most_bytes = 0;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
}

// Blocks of a kernel that the device holds at a time.
inline cudaError_t BlocksThatFit(const void* kernel, int threads, int bytes, KnownBlocks& known,
                                 int* blocks) {
  return AskedOnce(known, bytes, blocks, [&](int device) {
    if (bytes > 0) {
      if (cudaError_t error = AllowAllSharedMemory(kernel, device)) return error;
    }
    int per_processor = 0;
    const int processors = Processors();
    if (processors == 0) return cudaErrorInvalidDevice;
    if (cudaError_t error =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, bytes)) {
      return error;
    }
    *blocks = processors * std::max(per_processor, 1);
    return cudaSuccess;
  });
}

}  // namespace jgg

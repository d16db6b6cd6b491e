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

// As many bytes as a block may have there; a launch with more fails.
inline cudaError_t AllowAllSharedMemory(const void* kernel) {
  const int most = SharedMemory();
  if (most == 0) return cudaErrorInvalidDevice;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

// Dynamic shared memory for a launch with so many bytes. More than 48 KB have to be asked for, and
// static shared memory, of up to 8, counts.
template <typename Kernel>
cudaError_t AllowBytes(Kernel kernel, int bytes) {
  if (bytes > SharedMemory()) return cudaErrorInvalidConfiguration;
  if (bytes <= 40 << 10) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Blocks that a multiprocessor, which may be a pretended one, holds at a time.
inline cudaError_t BlocksPerProcessor(const void* kernel, int threads, int bytes, int* blocks) {
  if (cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, bytes)) {
    return error;
  }
  *blocks = std::min(*blocks, ProcessorSharedMemory() / (bytes + kSystemSharedMemory));
  return cudaSuccess;
}

// Blocks of a kernel that the device holds at a time.
inline cudaError_t BlocksThatFit(const void* kernel, int threads, int bytes, KnownBlocks& known,
                                 int* blocks) {
  return AskedOnce(known, bytes, blocks, [&](int) {
    if (bytes > 0) {
      if (cudaError_t error = AllowAllSharedMemory(kernel)) return error;
    }
    int per_processor = 0;
    const int processors = Processors();
    if (processors == 0) return cudaErrorInvalidDevice;
    if (cudaError_t error = BlocksPerProcessor(kernel, threads, bytes, &per_processor)) {
      return error;
    }
    *blocks = processors * std::max(per_processor, 1);
    return cudaSuccess;
  });
}

}  // namespace jgg

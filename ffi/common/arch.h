// The current device, asked once per device, and the sentence for calls that need a newer one.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>

namespace jgg {

// 80, 90, 100, ...; 0 where it cannot be read.
inline int ComputeCapability() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 0;
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
      return 0;
    }
    value = major * 10 + minor;
    known[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

template <cudaDeviceAttr kAttribute>
inline int AttributeOfDevice() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 0;
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) {
    if (cudaDeviceGetAttribute(&value, kAttribute, device) != cudaSuccess) return 0;
    known[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

// How many multiprocessors it has; 0 where that cannot be read.
inline int Processors() { return AttributeOfDevice<cudaDevAttrMultiProcessorCount>(); }

// Bytes of shared memory of a multiprocessor; 0 where that cannot be read.
inline int ProcessorSharedMemory() {
  return AttributeOfDevice<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
}

// Why a device of compute capability `found` cannot run what needs `needed` or newer.
inline std::optional<std::string> NeedsComputeCapability(int needed, int found) {
  if (found >= needed) return std::nullopt;
  const auto text = [](int value) {
    return std::to_string(value / 10) + "." + std::to_string(value % 10);
  };
  return "needs compute capability " + text(needed) + " or newer, got " + text(found);
}

}  // namespace jgg

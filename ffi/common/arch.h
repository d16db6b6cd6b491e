// The current device, asked once per device, and the sentence for calls that need a newer one.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>

namespace jgg {

// A number that JGG_PRETEND_GPU says the device has, or 0: "capability=89,processors=128,
// shared_memory=101376" is a 4090. Tests run what is chosen there on another GPU. It is read once.
inline int Pretended(const char* name) {
  const char* all = std::getenv("JGG_PRETEND_GPU");
  if (all == nullptr) return 0;
  const std::string listed = std::string(",") + all, key = std::string(",") + name + "=";
  const size_t at = listed.find(key);
  return at == std::string::npos ? 0 : std::atoi(listed.c_str() + at + key.size());
}

// A number of the current device, asked once per device, unless another is pretended; 0 where it
// cannot be read. Ask is a type of its own for each number.
template <typename Ask>
int OfDevice(const char* name, Ask ask) {
  static const int pretended = Pretended(name);
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 0;
  if (pretended != 0) return pretended;
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) {
    value = ask(device);
    known[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

inline int DeviceAttribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// 80, 90, 100, ...
inline int ComputeCapability() {
  return OfDevice("capability", [](int device) {
    return 10 * DeviceAttribute(cudaDevAttrComputeCapabilityMajor, device) +
           DeviceAttribute(cudaDevAttrComputeCapabilityMinor, device);
  });
}

// How many multiprocessors it has.
inline int Processors() {
  return OfDevice("processors", [](int device) {
    return DeviceAttribute(cudaDevAttrMultiProcessorCount, device);
  });
}

// Bytes of shared memory that a block may have.
inline int SharedMemory() {
  return OfDevice("shared_memory", [](int device) {
    return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  });
}

// Bytes of shared memory of a multiprocessor. The system takes a KB of them for each block.
constexpr int kSystemSharedMemory = 1024;
inline int ProcessorSharedMemory() { return SharedMemory() + kSystemSharedMemory; }

inline std::string CapabilityText(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// Why a device of compute capability `found` cannot run what needs `needed` or newer.
inline std::optional<std::string> NeedsComputeCapability(int needed, int found) {
  if (found >= needed) return std::nullopt;
  return "needs compute capability " + CapabilityText(needed) + " or newer, got " +
         CapabilityText(found);
}

// Why a device of compute capability `found` cannot run the kernels of sm_100a.
inline std::optional<std::string> NeedsSm100(int found) {
#ifndef JGG_SM100
  return "this build has no code for sm_100a";
#endif
  if (found == 100) return std::nullopt;
  return "needs compute capability 10.0, got " + CapabilityText(found);
}

}  // namespace jgg

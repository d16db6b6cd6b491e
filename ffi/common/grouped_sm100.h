// Arrays with an entry for each product, and tensor maps: CUTLASS's grouped kernels for Blackwell
// read them beside their operands. It is plain C++, which tests try on the host.
#pragma once

#include <cstdint>

namespace jgg::sm100 {

// Bytes of an entry: m, n and k; elements from one line to the next. See grouped_sm100.cuh.
inline constexpr int kShapeBytes = 12;
inline constexpr int kStrideBytes = 8;
// Six tensor maps for each multiprocessor. The grid has at most this many blocks, so the workspace
// depends on no device.
inline constexpr int kMostMultiprocessors = 160;
inline constexpr int64_t kTensorMapBytes = 6 * 128 * kMostMultiprocessors;

// Where the parts of a workspace are, in bytes from its first multiple of 256.
class Arena {
 public:
  static constexpr int64_t kAlignment = 256;

  // With what it has already taken.
  explicit Arena(int64_t bytes = kAlignment) : bytes_(bytes) {}

  int64_t Take(int64_t size) {
    const int64_t offset = bytes_ - kAlignment;
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  // The size of the workspace, with what aligning may skip.
  int64_t bytes() const { return bytes_; }

  // The first multiple in a workspace.
  static uint8_t* Base(void* workspace) {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    return static_cast<uint8_t*>(workspace) + (-address) % kAlignment;
  }

 private:
  int64_t bytes_;
};

}  // namespace jgg::sm100

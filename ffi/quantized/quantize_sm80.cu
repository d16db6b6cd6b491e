// Compiled once for each JGG_DTYPE, see CMakeLists.txt.
#include "quantized/quantize_sm80.h"

#include <algorithm>

#include "common/arch.h"
#include "quantized/device/quantize.cuh"

namespace jgg {

// Elements from `begin` on, `count` of them.
template <typename Coder>
static cudaError_t LaunchPart(cudaStream_t stream, const QuantizeArgs& args, int64_t begin,
                              int64_t count) {
  using Traits = device::QuantizeKernelTraits<Coder>;
  constexpr int kThreads = device::kQuantizeThreads;
  constexpr int kScale = sizeof(typename Traits::Scale) / Traits::kGroups;
  const int64_t bytes = count * device::kUnitBytes / Traits::kElements;
  const int64_t units = (bytes + device::kUnitBytes - 1) / device::kUnitBytes;
  const int64_t blocks =
      std::min<int64_t>((units + kThreads - 1) / kThreads, int64_t{Processors()} * Traits::kBlocks);
  if (blocks == 0) return units == 0 ? cudaSuccess : cudaErrorInvalidDevice;

  device::QuantizeParams p{};
  p.w = static_cast<const uint8_t*>(args.w) + begin / Traits::kElements * device::kUnitBytes;
  p.weight = static_cast<uint8_t*>(args.q.weight) + begin / 8 * Coder::kBits;
  p.scales = static_cast<uint8_t*>(args.q.scales) + begin / args.q.group_size * kScale;
  p.biases = static_cast<uint8_t*>(args.q.biases) + begin / args.q.group_size * kScale;
  p.pieces = static_cast<int32_t>(bytes / 16);
  while (Traits::kElements << p.lane_bits < args.q.group_size) ++p.lane_bits;
  const int64_t step = blocks * kThreads;
  p.step = static_cast<int32_t>(4 * step);
  p.w_step = step * device::kUnitBytes;
  p.weight_step = step * Traits::kBytes;
  p.scale_step = (step >> p.lane_bits) * sizeof(typename Traits::Scale);
  p.times = device::kNvfp4Times;
  p.global_scales = MakeGlobalScaleSteps(args.q, begin / args.q.group_size, Traits::kGroups * step);
  device::QuantizeKernel<Coder><<<static_cast<int>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <>
cudaError_t QuantizeSm80Instance<JGG_DTYPE>(cudaStream_t stream, const QuantizeArgs& args) {
  const auto launch = [&](auto coder) {
    constexpr int64_t kMost = int64_t{1} << 32;  // so that a kernel counts in 32 bits
    for (int64_t begin = 0; begin < args.q.elements; begin += kMost) {
      const int64_t count = std::min(kMost, args.q.elements - begin);
      if (cudaError_t error = LaunchPart<decltype(coder)>(stream, args, begin, count)) return error;
    }
    return cudaSuccess;
  };
  return device::DispatchCoder<JGG_DTYPE>(args.q.coding.mode, args.q.coding.bits,
                                          args.q.global_scale != nullptr, launch);
}

}  // namespace jgg

// Compiled once for each JGG_DTYPE, see CMakeLists.txt.
#include "quantized/dequantize_sm80.h"

#include <algorithm>

#include "common/arch.h"
#include "quantized/device/dequantize.cuh"

namespace jgg {

// Elements from `begin` on, `count` of them.
template <typename Decoder>
static cudaError_t LaunchPart(cudaStream_t stream, const DequantizeArgs& args, int64_t begin,
                              int64_t count) {
  constexpr int kThreads = device::kDequantizeThreads;
  constexpr int kSize = Decoder::kTo == DType::kF32 ? 4 : 2;
  const QuantizedArray& q = args.q;
  const int64_t units = (count + 31) / 32;
  const int64_t blocks =
      std::min<int64_t>((units + kThreads - 1) / kThreads,
                        int64_t{Processors()} * device::kDequantizeBlocks<JGG_DTYPE>);
  if (blocks == 0) return units == 0 ? cudaSuccess : cudaErrorInvalidDevice;

  device::DequantizeParams p{};
  const int64_t scales = begin / q.group_size * q.coding.ScaleBytes();
  p.weight = static_cast<const uint8_t*>(q.weight) + begin / 8 * Decoder::kBits;
  p.scales = static_cast<const uint8_t*>(q.scales) + scales;
  p.biases = static_cast<const uint8_t*>(q.biases) + scales;
  p.out = static_cast<uint8_t*>(args.out) + begin * kSize;
  p.halves = static_cast<int32_t>(count / 16);
  while (32 << p.group_bits < q.group_size) ++p.group_bits;
  p.scale_dtype = q.coding.scale_dtype;
  const int64_t step = blocks * kThreads;
  p.step = static_cast<int32_t>(2 * step);
  p.weight_step = step * 4 * Decoder::kBits;
  p.out_step = step * 32 * kSize;
  p.global_scales = MakeGlobalScaleSteps(q, begin / q.group_size, 2 * step);
  device::DequantizeKernel<Decoder><<<static_cast<int>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <>
cudaError_t DequantizeSm80Instance<JGG_DTYPE>(cudaStream_t stream, const DequantizeArgs& args) {
  const auto launch = [&](auto decoder) {
    constexpr int64_t kMost = int64_t{1} << 32;  // so that a kernel counts in 32 bits
    for (int64_t begin = 0; begin < args.q.elements; begin += kMost) {
      const int64_t count = std::min(kMost, args.q.elements - begin);
      if (cudaError_t error = LaunchPart<decltype(decoder)>(stream, args, begin, count)) {
        return error;
      }
    }
    return cudaSuccess;
  };
  return device::DispatchDecoder<JGG_DTYPE>(args.q.coding, args.q.global_scale != nullptr, launch);
}

}  // namespace jgg

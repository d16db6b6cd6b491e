// From DequantizeArgs to launches of the kernel.
#pragma once

#include <algorithm>

#include "quantized/device/dequantize.cuh"
#include "quantized/quantize.h"

namespace jgg {

// Parameters of a launch for `count` elements from `begin` on, with this many blocks.
template <typename Decoder>
device::DequantizeParams MakeDequantizeParams(const DequantizeArgs& args, int64_t begin,
                                              int64_t count, int64_t blocks) {
  constexpr int kSize = Size(Decoder::kTo);
  const QuantizedArray& q = args.q;
  const int64_t scales = begin / q.group_size * q.coding.ScaleBytes();
  device::DequantizeParams p{};
  p.weight = static_cast<const uint8_t*>(q.weight) + begin / 8 * Decoder::kBits;
  p.scales = static_cast<const uint8_t*>(q.scales) + scales;
  p.biases = static_cast<const uint8_t*>(q.biases) + scales;
  p.out = static_cast<uint8_t*>(args.out) + begin * kSize;
  p.halves = static_cast<int32_t>(count / 16);
  while (32 << p.group_bits < q.group_size) ++p.group_bits;
  if (q.group_size < 32) p.group_bits = -1;
  p.scale_dtype = q.coding.scale_dtype;
  const int64_t step = blocks * device::kDequantizeThreads;
  p.step = static_cast<int32_t>(2 * step);
  p.weight_step = step * 4 * Decoder::kBits;
  p.out_step = step * 32 * kSize;
  p.global_scales = MakeGlobalScaleSteps(q, begin / q.group_size, 2 * step);
  return p;
}

// Calls launch(decoder, blocks, params) for parts of at most `most` elements, so that a kernel
// counts in 32 bits. It ends with the first launch that does not return 0.
template <DType kTo, typename Launch>
auto LaunchDequantize(const DequantizeArgs& args, int processors, Launch launch,
                      int64_t most = int64_t{1} << 32) {
  const auto parts = [&](auto decoder) {
    constexpr int64_t kTile = int64_t{device::kDequantizeThreads} * 32;
    decltype(launch(decoder, 0, device::DequantizeParams{})) error{};
    for (int64_t begin = 0; begin < args.q.elements && !error; begin += most) {
      const int64_t count = std::min(most, args.q.elements - begin);
      const int64_t blocks = std::min((count + kTile - 1) / kTile,
                                      int64_t{processors} * device::kDequantizeBlocks<kTo>);
      const auto p = MakeDequantizeParams<decltype(decoder)>(args, begin, count, blocks);
      error = launch(decoder, static_cast<int>(blocks), p);
    }
    return error;
  };
  if constexpr (kTo == DType::kBF16) {
    if (args.ordered) return parts(device::OrderedDecoder{});
  }
  return device::DispatchDecoder<kTo>(args.q.coding, args.q.global_scale != nullptr, parts);
}

}  // namespace jgg

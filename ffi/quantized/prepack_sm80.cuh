// From PrepackArgs to a launch of the kernel.
#pragma once

#include <type_traits>

#include "quantized/device/prepack.cuh"
#include "quantized/quantize.h"

namespace jgg {

inline device::PrepackParams MakePrepackParams(const PrepackArgs& args) {
  const QuantizedArray& q = args.q;
  device::PrepackParams p{};
  p.weight = static_cast<const uint8_t*>(q.weight);
  p.scales = static_cast<const uint8_t*>(q.scales);
  p.biases = static_cast<const uint8_t*>(q.biases);
  p.out = static_cast<uint8_t*>(args.weight);
  p.out_scales = static_cast<uint8_t*>(args.scales);
  p.k_tiles = static_cast<int32_t>(args.k / 64);
  p.blocks_along_k = (p.k_tiles + 3) / 4;
  while (64 << p.group_bits < q.group_size) ++p.group_bits;
  return p;
}

// Whether scales are stored by a kernel of their own.
inline bool PrepacksScalesAlone(const QuantizedArray& q) {
  if (!q.coding.HasFloatScales()) return false;
  return q.coding.scale_dtype == DType::kF32 || q.group_size < 32;
}

// launch(blocks, params), and its result.
template <typename Launch>
auto LaunchPrepackScales(const PrepackArgs& args, Launch launch) {
  const QuantizedArray& q = args.q;
  device::PrepackScalesParams p{};
  p.scales = static_cast<const uint8_t*>(q.scales);
  p.biases = static_cast<const uint8_t*>(q.biases);
  p.out = static_cast<uint8_t*>(args.scales);
  p.groups = static_cast<int32_t>(args.k / q.group_size);
  p.count = args.rows * p.groups;
  p.floats = q.coding.scale_dtype == DType::kF32;
  constexpr int kThreads = device::kPrepackThreads;
  return launch(static_cast<unsigned>((p.count + kThreads - 1) / kThreads), p);
}

// launch(mode, bits, scale_words, blocks, params), the first three as constants; its result.
template <typename Launch>
auto LaunchPrepack(const PrepackArgs& args, Launch launch) {
  device::PrepackParams p = MakePrepackParams(args);
  if (PrepacksScalesAlone(args.q)) p.out_scales = nullptr;
  const auto blocks = static_cast<unsigned>(args.rows / 64 * p.blocks_along_k);
  const Coding& coding = args.q.coding;
  return PrepackedFormats::Dispatch(coding.mode, coding.bits, [&](auto format) {
    using Format = decltype(format);
    const std::integral_constant<Mode, Format::kMode> mode;
    const std::integral_constant<int, Format::kBits> bits;
    if constexpr (kMostScaleWordsOf<Format> == 2) {  // as many as groups of 32 have
      if (args.q.group_size == 32) {
        return launch(mode, bits, std::integral_constant<int, 2>{}, blocks, p);
      }
    }
    return launch(mode, bits, std::integral_constant<int, 1>{}, blocks, p);
  });
}

}  // namespace jgg

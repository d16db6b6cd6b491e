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

// launch(mode, bits, scale_words, blocks, params), the first three as constants; its result.
template <typename Launch>
auto LaunchPrepack(const PrepackArgs& args, Launch launch) {
  const device::PrepackParams p = MakePrepackParams(args);
  const auto blocks = static_cast<unsigned>(args.rows / 64 * p.blocks_along_k);
  using One = std::integral_constant<int, 1>;
  using Four = std::integral_constant<int, 4>;
  switch (args.q.coding.mode) {
    case Mode::kNvfp4:
      return launch(std::integral_constant<Mode, Mode::kNvfp4>{}, Four{}, One{}, blocks, p);
    case Mode::kMxfp4:
      return launch(std::integral_constant<Mode, Mode::kMxfp4>{}, Four{}, One{}, blocks, p);
    default: break;
  }
  const auto affine = [&](auto bits) {
    const std::integral_constant<Mode, Mode::kAffine> mode;
    if (args.q.group_size > 32) return launch(mode, bits, One{}, blocks, p);
    return launch(mode, bits, std::integral_constant<int, 2>{}, blocks, p);
  };
  switch (args.q.coding.bits) {
    case 2: return affine(std::integral_constant<int, 2>{});
    case 3: return affine(std::integral_constant<int, 3>{});
    case 5: return affine(std::integral_constant<int, 5>{});
    case 6: return affine(std::integral_constant<int, 6>{});
    case 8: return affine(std::integral_constant<int, 8>{});
    default: return affine(Four{});
  }
}

}  // namespace jgg

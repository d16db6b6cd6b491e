// From QuantizeArgs to launches of the kernel.
#pragma once

#include <algorithm>

#include "quantized/device/quantize.cuh"
#include "quantized/quantize.h"

namespace jgg {

// Parameters of a launch for `count` elements from `begin` on. Blocks take one tile after another:
// each the next of all (`run` 1), or runs of their own.
template <typename Coder>
device::QuantizeParams MakeQuantizeParams(const QuantizeArgs& args, int64_t begin, int64_t count,
                                          int64_t blocks, int64_t run) {
  using Traits = device::QuantizeKernelTraits<Coder>;
  constexpr int kScale = sizeof(typename Traits::Scale) / Traits::kGroups;
  const QuantizedArray& q = args.q;
  device::QuantizeParams p{};
  p.w = static_cast<const uint8_t*>(args.w) + begin / Traits::kElements * device::kUnitBytes;
  p.weight = static_cast<uint8_t*>(q.weight) + begin / 8 * Coder::kBits;
  p.scales = static_cast<uint8_t*>(q.scales) + begin / q.group_size * kScale;
  p.biases = static_cast<uint8_t*>(q.biases) + begin / q.group_size * kScale;
  p.pieces = static_cast<int32_t>(count * device::kUnitBytes / Traits::kElements / 16);
  while (Traits::kElements << p.lane_bits < q.group_size) ++p.lane_bits;
  const int64_t step = (run == 1 ? blocks : 1) * device::kQuantizeThreads;
  p.block_units = static_cast<int32_t>(run * device::kQuantizeThreads);
  p.reach = run == 1 ? p.pieces : 4 * p.block_units;
  p.step = static_cast<int32_t>(4 * step);
  p.w_step = step * device::kUnitBytes;
  p.weight_step = step * Traits::kBytes;
  p.scale_step = (step >> p.lane_bits) * sizeof(typename Traits::Scale);
  p.global_scales = MakeGlobalScaleSteps(q, begin / q.group_size, Traits::kGroups * step);
  p.times = device::kNvfp4Times;
  return p;
}

// Calls launch(coder, blocks, params) for parts of at most `most` elements, so that a kernel counts
// in 32 bits. It ends with the first launch that does not return 0.
template <DType kOf, typename Launch>
auto LaunchQuantize(const QuantizeArgs& args, int processors, Launch launch,
                    int64_t most = int64_t{1} << 32) {
  const auto parts = [&](auto coder) {
    using Traits = device::QuantizeKernelTraits<decltype(coder)>;
    constexpr int64_t kTile = int64_t{device::kQuantizeThreads} * Traits::kElements;
    decltype(launch(coder, 0, device::QuantizeParams{})) error{};
    for (int64_t begin = 0; begin < args.q.elements && !error; begin += most) {
      const int64_t count = std::min(most, args.q.elements - begin);
      const int64_t tiles = (count + kTile - 1) / kTile;
      int64_t blocks = std::min(tiles, int64_t{processors} * Traits::kBlocks), run = 1;
      if constexpr (decltype(coder)::kGlobal) {
        // A thread finds its global scale by divisions, which it should not do for every tile.
        run = (tiles + blocks - 1) / blocks;
        blocks = (tiles + run - 1) / run;
      }
      const auto p = MakeQuantizeParams<decltype(coder)>(args, begin, count, blocks, run);
      error = launch(coder, static_cast<int>(blocks), p);
    }
    return error;
  };
  return device::DispatchCoder<kOf>(args.q.coding.mode, args.q.coding.bits,
                                    args.q.global_scale != nullptr, parts);
}

}  // namespace jgg

// From PrepackFp8Args to a launch of the kernel.
#pragma once

#include <algorithm>

#include "quantized/device/prepack_fp8.cuh"
#include "quantized/quantize.h"

namespace jgg {

// launch(blocks, params); its result.
template <typename Launch>
auto LaunchPrepackFp8(const PrepackFp8Args& args, Launch launch) {
  device::PrepackFp8Params p{};
  p.weight = static_cast<const uint8_t*>(args.weight);
  p.scales = args.scales;
  p.out = static_cast<uint8_t*>(args.out);
  p.out_scales = static_cast<uint32_t*>(args.out_scales);
  p.row_tiles = static_cast<int32_t>(args.n / 64);
  p.units = static_cast<int32_t>(args.k / 128);
  p.blocks_along_k = (p.units + device::kPrepackFp8Units - 1) / device::kPrepackFp8Units;
  p.scale_rows = static_cast<int32_t>(args.scale_rows);
  p.scale_columns = static_cast<int32_t>(args.scale_columns);
  p.rows_each = static_cast<int32_t>(std::min(args.block_rows, args.n));
  p.units_each = static_cast<int32_t>((std::min(args.block_columns, args.k) + 127) / 128);
  p.some = args.some;
  p.metadata = args.metadata;
  const int64_t blocks = args.groups * p.row_tiles * p.blocks_along_k;
  return launch(static_cast<unsigned>(blocks), p);
}

}  // namespace jgg

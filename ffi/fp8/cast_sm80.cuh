// Which kernel a call of fp8_cast takes.
#pragma once

#include "common/blocks_that_fit.h"
#include "common/dispatch.h"
#include "fp8/cast_sm80.h"
#include "fp8/device/cast_own.cuh"
#include "fp8/launch_sm80.cuh"

namespace jgg {

namespace fp8 {

// Makes the parameters that all kernels take. An element has `size` bytes.
inline cudaError_t MakeCastParams(cudaStream_t stream, const Fp8CastSm80& args, int64_t size,
                                  CastParams* to) {
  CastParams& cast = *to;
  QuantizeParams& p = cast.of;
  p = ParamsOf(Fp8Codes{args.codes, nullptr, nullptr}, args.along);
  p.x = static_cast<const uint8_t*>(args.x);
  p.matrices = args.matrices;
  p.rows = args.rows;
  p.columns = args.columns;
  p.list = args.list;
  p.x_lines = args.x_lines;
  if (p.list != nullptr) {
    const int64_t spans = kSliceBytes / (p.x_lines * kBlock * size);
    p.slice = static_cast<uint32_t>(std::clamp<int64_t>(spans, 1, CeilDiv(p.columns, kBlock)));
  }
  cast.turned = static_cast<uint8_t*>(args.turned);
  cast.known = args.scales;
  cast.wanted = args.wanted;
  cast.largest = static_cast<uint2*>(args.largest);
  if (args.sizes == nullptr) return cudaSuccess;
  const int64_t tiles = args.turned != nullptr ? args.tiles() : 0;
  return FindGroups(stream, args.sizes, args.groups, args.workspace, &p, tiles);
}

// Scales of matrices themselves, and codes. One kernel makes both where the device holds two
// matrices at a time, so that one is read while another one is written.
template <DType kOf, Element kElement>
cudaError_t LaunchCastOwn(cudaStream_t stream, const Fp8CastSm80& args, CastParams cast) {
  const int64_t blocks = args.blocks(), all = blocks * args.matrices;
  CastOwnParams own{};
  own.cast = cast;
  own.scales = args.own_scales;
  own.said = static_cast<uint64_t*>(args.workspace);
  own.begun = reinterpret_cast<int32_t*>(own.said + all);
  own.blocks = static_cast<uint32_t>(blocks);
  static KnownBlocks known;
  int fit = 0;
  const auto kernel = CastOwnKernel<kOf, kElement>;
  if (cudaError_t error =
          BlocksThatFit(reinterpret_cast<const void*>(kernel), kSquareThreads, 0, known, &fit)) {
    return error;
  }
  const int64_t limit = INT32_MAX - fit;
  const bool one_read = 2 * blocks <= fit && all <= limit;
  const int64_t bytes = one_read ? 8 * all + 4 : 8 * args.matrices;
  if (cudaError_t error = cudaMemsetAsync(args.workspace, 0, bytes, stream)) return error;
  if (one_read) {
    const int64_t grid = std::min<int64_t>(fit, all);
    return LaunchQuantize(stream, own, kernel, grid, 1, kSquareThreads);
  }
  own.found = static_cast<uint32_t*>(args.workspace);
  own.counted = reinterpret_cast<int32_t*>(own.found + args.matrices);
  // As many thread blocks as run at a time, or fewer where each has little to read.
  const int64_t most = int64_t{8} * Processors() / std::min<int64_t>(args.matrices, 65535);
  const int64_t parts =
      std::clamp<int64_t>(args.rows * args.columns >> 14, 1, std::max<int64_t>(most, 1));
  if (cudaError_t error = LaunchQuantize(stream, own, LargestOwnKernel<kOf, kElement>, parts,
                                         args.matrices, kLargestThreads)) {
    return error;
  }
  own.cast.known = args.own_scales;
  return LaunchQuantize(stream, own.cast, CastKernel<kOf, kElement>, blocks, args.matrices,
                        kSquareThreads);
}

}  // namespace fp8

template <DType kOf>
cudaError_t LaunchFp8CastSm80Instance(cudaStream_t stream, const Fp8CastSm80& args) {
  using namespace fp8;
  CastParams cast{};
  if (cudaError_t error = MakeCastParams(stream, args, Size(kOf), &cast)) return error;
  if (!args.has_codes()) {
    return LaunchQuantize(stream, cast, LargestKernel<kOf>, args.parts, args.matrices,
                          kLargestThreads);
  }
  return DispatchBool(args.e5m2, [&](auto e5m2) {
    constexpr Element kElement = e5m2.value ? Element::kE5M2 : Element::kE4M3;
    if (args.own_scales != nullptr) return LaunchCastOwn<kOf, kElement>(stream, args, cast);
    return LaunchQuantize(stream, cast, CastKernel<kOf, kElement>, args.blocks(), args.matrices,
                          kSquareThreads);
  });
}

}  // namespace jgg

// Which kernel a call of fp8_cast takes.
#pragma once

#include "common/dispatch.h"
#include "fp8/cast_sm80.h"
#include "fp8/device/cast.cuh"
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
    return LaunchQuantize(stream, cast, CastKernel<kOf, kElement>, args.blocks(), args.matrices,
                          kSquareThreads);
  });
}

}  // namespace jgg

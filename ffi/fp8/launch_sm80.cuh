// How kernels of FP8's quantizer begin: their grid, and where groups of rows are.
#pragma once

#include <algorithm>

#include "fp8/codes.h"
#include "fp8/device/quantize_tiles.cuh"

namespace jgg::fp8 {

using namespace device;

template <typename Params>
cudaError_t LaunchQuantize(cudaStream_t stream, const Params& p, void (*kernel)(Params),
                           int64_t blocks, int64_t matrices, int threads) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(std::min<int64_t>(matrices, 65535)));
  kernel<<<grid, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

// The result has one matrix, in lines of `along` elements.
inline QuantizeParams ParamsOf(const Fp8Codes& to, int64_t along) {
  QuantizeParams p{};
  p.matrices = 1;
  p.along = along;
  p.blocks = CeilDiv(along, kBlock);
  p.seed = to.seed;
  p.codes = static_cast<uint8_t*>(to.codes);
  p.scales = to.scales;
  return p;
}

// p->inside, and of so many tiles p->groups, of groups of p->rows. The workspace has
// Fp8GroupsWords(groups, count).
inline cudaError_t FindGroups(cudaStream_t stream, const int32_t* sizes, int64_t groups,
                              void* workspace, QuantizeParams* p, int64_t count) {
  const auto g = static_cast<int32_t>(groups);
  auto* starts = static_cast<int32_t*>(workspace);
  int32_t* tiles = starts + g + 1;
  auto* of_tiles = reinterpret_cast<TileRows*>(tiles + g + 1);
  GroupsKernel<<<1, kScanThreads, 0, stream>>>(sizes, g, static_cast<int32_t>(p->rows), starts,
                                               tiles, of_tiles, static_cast<int32_t>(count));
  p->inside = starts + g;
  if (count > 0) p->groups = of_tiles;
  return cudaGetLastError();
}

}  // namespace jgg::fp8

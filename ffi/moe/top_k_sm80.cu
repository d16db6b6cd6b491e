#include "moe/top_k_sm80.h"

#include "moe/device/top_k.cuh"

namespace jgg {

template <int kItems>
static cudaError_t Launch(cudaStream_t stream, const TopKArgs& args) {
  using namespace device;
  const auto blocks = static_cast<unsigned>((args.tokens + kTopKWarps - 1) / kTopKWarps);
  TopK<kItems><<<blocks, 32 * kTopKWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t top_k_sm80(cudaStream_t stream, const TopKArgs& args) {
  const int items = (args.experts + 31) / 32;
  if (items <= 1) return Launch<1>(stream, args);
  if (items <= 2) return Launch<2>(stream, args);
  if (items <= 4) return Launch<4>(stream, args);
  if (items <= 8) return Launch<8>(stream, args);
  if (items <= 16) return Launch<16>(stream, args);
  return Launch<32>(stream, args);
}

}  // namespace jgg

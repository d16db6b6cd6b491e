// The kernel that makes planes: any GPU of compute capability 8.0 or newer. A thread has 8
// neighbouring values of the result: 32 bytes in, 16 bytes out to each plane.
#include <algorithm>

#include "common/processors.h"
#include "grouped_mm/planes.h"

namespace jgg {
namespace device {

constexpr int kPlanesThreads = 256, kPiece = 8;

__device__ inline float Cut(float value) {
  return __uint_as_float(__float_as_uint(value) & 0xffff0000u);
}

// The upper half of a float32 whose lower half does not matter, or is zeros.
__device__ inline uint32_t Half(float value) {
  const uint32_t bits = __float_as_uint(value);
  // A NaN may have set bits in its lower half only.
  return bits >> 16 | (value != value ? 0x40u : 0u);
}

template <int kPlanes>
__device__ void Split(float value, uint32_t (&halves)[kPlanes]) {
  const bool finite = fabsf(value) <= 3.4028234663852886e38f;
  float part = Cut(value), rest = value - part;
  const float least = fabsf(part) > 0x1p-60f ? part * 0x1p-60f : 0.0f;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const float shown = plane > 0 && part == 0.0f ? least : part;
    halves[plane] = Half(finite ? shown : value);
    part = Cut(rest);
    rest = rest - part;
  }
}

template <int kPlanes>
__device__ void MakePiece(const PlanesArgs& args, int64_t piece) {
  const int64_t pieces = args.out_n / kPiece;  // of a line
  const int64_t out_line = piece / pieces, first = (piece - out_line * pieces) * kPiece;
  const int64_t group = out_line / args.out_lines, line = out_line - group * args.out_lines;
  float values[kPiece] = {};
  if (line < args.lines) {
    const float* from = args.from + (group * args.lines + line) * args.n + first;
    if (first + kPiece <= args.n && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(from);
      *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(from + 4);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (first + i < args.n) values[i] = from[i];
      }
    }
  }
  uint32_t words[kPlanes][kPiece / 2];
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    uint32_t low[kPlanes], high[kPlanes];
    Split<kPlanes>(values[i], low);
    Split<kPlanes>(values[i + 1], high);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      words[plane][i / 2] = high[plane] << 16 | low[plane];
    }
  }
  uint4* to = static_cast<uint4*>(args.to) + out_line * kPlanes * pieces + first / kPiece;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    to[plane * pieces] =
        make_uint4(words[plane][0], words[plane][1], words[plane][2], words[plane][3]);
  }
}

template <int kPlanes>
__global__ void __launch_bounds__(kPlanesThreads)
    PlanesKernel(const PlanesArgs a, const PlanesArgs b, int64_t pieces_a, int64_t pieces) {
  const int64_t step = int64_t{gridDim.x} * kPlanesThreads;
  for (int64_t piece = int64_t{blockIdx.x} * kPlanesThreads + threadIdx.x; piece < pieces;
       piece += step) {
    if (piece < pieces_a) {
      MakePiece<kPlanes>(a, piece);
    } else {
      MakePiece<kPlanes>(b, piece - pieces_a);
    }
  }
}

}  // namespace device

cudaError_t MakePlanes(cudaStream_t stream, const PlanesArgs& a, const PlanesArgs& b, int planes) {
  const auto pieces = [](const PlanesArgs& args) {
    return args.groups * args.out_lines * args.out_n / device::kPiece;
  };
  const int64_t pieces_a = pieces(a), all = pieces_a + pieces(b);
  if (all == 0) return cudaSuccess;
  constexpr int64_t kThreads = device::kPlanesThreads;
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>((all + kThreads - 1) / kThreads, 32 * kH200Processors));
  if (planes == 2) {
    device::PlanesKernel<2><<<blocks, kThreads, 0, stream>>>(a, b, pieces_a, all);
  } else {
    device::PlanesKernel<3><<<blocks, kThreads, 0, stream>>>(a, b, pieces_a, all);
  }
  return cudaGetLastError();
}

}  // namespace jgg

// Products of few rows with weights in layout "sm90" (quantized/gemm_sm90.h) by mma.sync, which
// reads them as packed_sm80.cuh says.
//
// A block has 64 columns. Its warps share out tiles of 64 k, and take them in turns. A warp loads
// its codes from global memory to registers: those of its next tile are under way while it decodes.
// Scales and rows of x come by way of a ring of its own. So no warp waits for another until all
// have their sums, which they add up in order.
#pragma once

#include <cstdint>

#include "quantized/device/few_rows_sm80.cuh"
#include "quantized/device/packed_few_product_sm80.cuh"

namespace jgg::device {

// Weights are PackedTiles. kM: rows, of which an instruction has 8.
template <typename Weights_, int kM_, int kBlocksPerSm_>
struct PackedFewRowsConfig {
  using Weights = Weights_;
  using Element =
      std::conditional_t<Weights::kX == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  static constexpr int kM = kM_, kEights = kM / 8;
  using Ops = FewRowsOps<kEights>;
  static constexpr int kN = 64, kThreads = Ops::kThreads, kWarps = kThreads / 32;
  static constexpr int kBlocksPerSm = kBlocksPerSm_, kSlots = 3;
  // A slot has rows of x, of 128 bytes each, and scales.
  static constexpr int kRowBytes = 128 * kM;
  static constexpr int kScaleBytes = Weights::kTileScales * Weights::Codes::kMostScaleWords;
  static constexpr int kSlotBytes = kRowBytes + kScaleBytes;
  using Work = Schedule<kM, kN, kThreads, true, true, 2 * kThreads, false, false, true>;
  using Result = ResultTile<kM, kN, kThreads, true>;

  struct SharedMemory {
    typename Work::Memory schedule;
    union {
      alignas(128) char slots[kWarps][kSlots][kSlotBytes];
      alignas(128) float4 partial[kWarps][4][kEights][32];
      alignas(128) float result[Result::kFloats];
    };
  };
};

// The sums of a tile. Warp i adds up columns 16 i to 16 i + 15 of all warps'.
template <typename Config>
__device__ void MultiplyPackedTile(const PackedFewRowsSm80& of, typename Config::Work& work,
                                   const Tile& tile, typename Config::SharedMemory& shared,
                                   typename Config::Ops& ops) {
  constexpr int kEights = Config::kEights;
  float sums[4][kEights][4] = {};
  int index = -1;
  Segment segment;
  if (work.NextSegment(index, segment)) {
    AddPackedSegment<Config>(of, tile, segment, shared, sums);
  }
  const int warp = ThreadAnew() / 32, lane = ThreadAnew() % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const float (&four)[4] = sums[i][e];
      shared.partial[warp][i][e][lane] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
  __syncthreads();
  ops.Clear();
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      ops.AddSums(e, shared.partial[w][warp][e][lane], Config::Weights::kFactor);
    }
  }
  __syncthreads();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    PackedFewRowsSm80Kernel(const __grid_constant__ PackedFewRowsSm80 of) {
  __builtin_assume(threadIdx.x < Config::kThreads);
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(SharedBytes());
  typename Config::Work work(of.gemm.gemm, shared.schedule);
  const Tile& tile = shared.schedule.tile;
  while (work.Next()) {
    typename Config::Ops ops;
    MultiplyPackedTile<Config>(of, work, tile, shared, ops);
    if (of.gemm.w.global_scale.data != nullptr && tile.weight >= 0) {
      ScaleSums<Config>(of.gemm, tile, tile.weight, shared.result, ops);
    }
    Config::Result::Store(of.gemm.gemm, tile, ops, shared.result);
  }
}

}  // namespace jgg::device

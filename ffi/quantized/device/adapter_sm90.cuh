// A product of low rank beside that with a quantized weight: rows (T, rank) @ weights (G, rank, N).
// It is added to a tile's sums, so the result is written once and nobody reads it again.
//
// Behind the slices of a tile its ring has one more stage, or two where a stage has one slice. The
// thread that copies x fills it: the first slice's place has the tile's rows, 64 of rank, and the
// next has weights, lines of 64 columns for each warpgroup. TMA fills up with zeros what rank
// lacks.
#pragma once

#include <type_traits>
#include <utility>

#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

// Whether a tile has an adapter's stages. Rows of no group have none.
__device__ inline bool HasAdapter(const QuantizedGemmSm90& quantized, const Work& work) {
  return quantized.adapter_rank > 0 && work.slices > 0;
}

// Lines of an adapter's weights in shared memory: whole steps of an instruction.
__device__ inline int AdapterLines(int rank) { return (rank + 15) / 16 * 16; }

// Bytes from a stage's rows of an adapter to its weights, and those of a warpgroup's weights.
template <typename Config>
struct AdapterPlaces {
  static_assert(Config::kChunkL == 64);
  static constexpr int kRowsBytes = Config::kRows * 128;
  static constexpr bool kTwoStages = Config::kSlices == 1;
  static constexpr int kWeights = kTwoStages ? 0 : kRowsBytes;
  static constexpr int kEach = rules::kMostAdapterRank * 128;
  static_assert(2 * kEach <= kRowsBytes);
};

// The thread that copies x fills an adapter's stages.
template <typename Config, typename Stage>
__device__ void CopyAdapter(const QuantizedGemmSm90& quantized,
                            typename Config::SharedMemory& memory, const Work& work, Stage& at) {
  using Places = AdapterPlaces<Config>;
  const GemmSm90& gemm = quantized.gemm;
  const int chunks = (work.rows + Config::kChunkL - 1) / Config::kChunkL;
  const int groups = max(0, min(2, (work.columns + 63) / 64));
  const int rows_bytes = chunks * Config::kChunkBytesL;
  const int weights_bytes = groups * AdapterLines(quantized.adapter_rank) * 128;
  const auto begin = [&](int bytes) {
    Wait(&memory.empty[at.index], at.parity ^ 1);
    ArriveExpecting(&memory.full[at.index], bytes);
  };
  begin(Places::kTwoStages ? rows_bytes : rows_bytes + weights_bytes);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    CopyBox<false>(&gemm.rest_maps.r[0], &memory.full[at.index],
                   memory.l[at.index] + i * Config::kChunkBytesL, 0,
                   work.l_row + i * Config::kChunkL, 0);
  }
  if constexpr (Places::kTwoStages) {
    at.Next();
    begin(weights_bytes);
  }
#pragma unroll 1
  for (int i = 0; i < groups; ++i) {
    CopyBox<false>(&gemm.rest_maps.r[1], &memory.full[at.index],
                   memory.l[at.index] + Places::kWeights + i * Places::kEach,
                   work.out_column + 64 * i, 0, work.weight);
  }
  at.Next();
}

// Threads that copy something else go past an adapter's stages.
template <typename Config, typename Stage>
__device__ void PassAdapter(typename Config::SharedMemory& memory, Stage& at) {
#pragma unroll
  for (int i = 0; i < (AdapterPlaces<Config>::kTwoStages ? 2 : 1); ++i) {
    Wait(&memory.empty[at.index], at.parity ^ 1);
    ArriveExpecting(&memory.full[at.index], 0);
    at.Next();
  }
}

// A warpgroup adds an adapter's product to its sums of a tile.
template <typename Config, typename Stage, int kSums>
__device__ void AddAdapter(const QuantizedGemmSm90& quantized,
                           typename Config::SharedMemory& memory, int group, Stage& at,
                           float (&sums)[kSums]) {
  using Places = AdapterPlaces<Config>;
  using Element =
      std::conditional_t<Config::Weights::kX == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  using Instruction = WarpgroupProduct<Element, Config::kRows, cute::SM90::GMMA::Major::MN,
                                       cute::SM90::GMMA::Major::K>;
  Stage here{Uniform(at.index), Uniform(at.parity)};
  const int steps = Uniform(AdapterLines(quantized.adapter_rank) / 16);
  const auto tile = [&](int offset) {
    return TileDescriptor(Uniform(SharedAddress(memory.l) + offset), 64 * 128) +
           here.index * (sizeof(memory.l[0]) >> 4);
  };
  Wait(&memory.full[here.index], here.parity);
  const uint32_t rows = tile(0);
  const int first = here.index;
  if constexpr (Places::kTwoStages) {
    here.Next();
    Wait(&memory.full[here.index], here.parity);
  }
  const uint32_t weights = tile(Places::kWeights + group * Places::kEach);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WarpgroupArrive();
    Multiply<Instruction>(weights + (step * 16 * 128 >> 4), rows + (step * 32 >> 4), sums, true,
                          std::make_index_sequence<kSums>{});
    WarpgroupCommit();
  }
  WarpgroupWait<0>();
  if constexpr (Places::kTwoStages) Release<Config>(memory, first);
  Release<Config>(memory, here.index);
  here.Next();
  at = here;
}

}  // namespace jgg::device

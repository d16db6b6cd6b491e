// The kernel: grouped_mm/device/gemm_sm80.cuh with a B that is decoded between the ring, where it
// lies as it does in global memory, and the products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "grouped_mm/device/compute_sm80.cuh"
#include "grouped_mm/device/copy_sm80.cuh"
#include "grouped_mm/device/epilogue_sm80.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "quantized/device/quantized_copy_sm80.cuh"

namespace jgg::device {

// The operands of a tile, and what most tiles have in common. Traits of a tile derive from this;
// they say kM, kN, kK (of a slice), kStages, kBlocksPerSm and how Ops shares the tile out
// (../gemm_sm80.cuh).
template <typename Element_, bool kBKMajor_>
struct QuantizedTraitsSm80 {
  using Element = Element_;
  using Format = AnyCoding;
  static constexpr bool kBKMajor = kBKMajor_;
  static constexpr bool kAligned = false;  // rows of A begin at multiples of 16 bytes
};

template <typename Traits, typename Ops_>
struct QuantizedGemmConfig {
  using Element = typename Traits::Element;
  using Ops = Ops_;
  using Format = typename Traits::Format;
  static constexpr bool kBKMajor = Traits::kBKMajor, kAligned = Traits::kAligned;
  static constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK;
  static constexpr int kStages = Traits::kStages, kBlocksPerSm = Traits::kBlocksPerSm;
  static constexpr int kThreads = Ops::kThreads;
  static constexpr bool kSumsApart = kM == 16;  // only the lowest tiles know how
  using Work = Schedule<kM, kN, kThreads, true, kBKMajor>;
  using CopyA =
      cute::conditional_t<Ops::ATile::kTransposed,
                          TransposingCopy<Element, kM, kK, kThreads, typename Ops::ATile>,
                          TileCopy<Element, true, kM, kK, kThreads, typename Ops::ATile, kAligned>>;
  using CopyB = QuantizedCopy<Element, kBKMajor, kN, kK, kThreads, typename Ops::BTile, Format>;
  using Result = ResultTile<kM, kN, kThreads, true>;

  struct SharedMemory {
    typename Work::Memory schedule;
    struct Slices {
      alignas(128) Element a[kStages][Ops::ATile::kElements];
      alignas(128) Element b[Ops::BTile::kElements];  // decoded
    };
    union {
      Slices slices;
      alignas(128) float result[Result::kFloats];
    };
  };
  // Behind the slices, in the room of the result: the ring of B, kStages * PackedSlice::bytes.
  // Behind that, where SumsApart: kept sums.
  static constexpr int kRing =
      offsetof(SharedMemory, slices) + sizeof(typename SharedMemory::Slices);
};

// Add the products of one segment to a tile.
template <typename Config>
__device__ void AddQuantizedSegment(const QuantizedGemmSm80& gemm, const Tile& tile,
                                    const Segment& segment,
                                    typename Config::SharedMemory::Slices& slices,
                                    unsigned char* ring, typename Config::Ops& ops) {
  using Element = typename Config::Element;
  constexpr int kStages = Config::kStages, kK = Config::kK;
  const int k_end = static_cast<int>(gemm.gemm.k);
  const Lines lines{gemm.gemm.a_line, 0};
  typename Config::CopyA copy_a;
  typename Config::CopyB copy_b;
  const int64_t row = segment.x_start + (tile.row0 - segment.y_start);
  copy_a.Begin(static_cast<const Element*>(gemm.gemm.a) + row * gemm.gemm.a_line, lines, tile.m_lo,
               tile.m_hi, gemm.gemm.a_width, Config::kM);
  copy_b.Begin(gemm, segment.weight, tile.n0, tile.n_count);
  // Start copying the slice from k on, if there is one, into a place of the ring.
  const auto start = [&](int place, int k) {
    if (k < k_end) {
      copy_a.Next(slices.a[place], lines, k, 0, k_end);
      copy_b.Start(gemm, ring + place * gemm.slice.bytes, k);
    }
    cute::cp_async_fence();  // an empty group too, so that there is one per slice
  };
#pragma unroll 1
  for (int place = 0; place < kStages - 1; ++place) start(place, place * kK);
  int place = 0;
#pragma unroll 1
  for (int k = 0; k < k_end; k += kK) {
    cute::cp_async_wait<kStages - 2>();
    // This slice has landed, and nobody reads the one before it, or what that was decoded to.
    __syncthreads();
    start(place == 0 ? kStages - 1 : place - 1, k + (kStages - 1) * kK);
    copy_b.Decode(gemm, ring + place * gemm.slice.bytes, slices.b, k);
    __syncthreads();
    ops.Add(slices.a[place], slices.b, [] {});
    place = place + 1 == kStages ? 0 : place + 1;
  }
  __syncthreads();
}

// Multiply the sums by the global scale of a weight, or of each of its columns. `factors` is free.
template <typename Config>
__device__ void ScaleSums(const QuantizedGemmSm80& gemm, const Tile& tile, int64_t weight,
                          float* factors, typename Config::Ops& ops) {
  const int half = IsGated(gemm.gemm.epilogue.activation) ? Config::kN / 2 : Config::kN;
  for (int n = threadIdx.x; n < Config::kN; n += Config::kThreads) {
    const int in_half = n % half;
    const int64_t column = tile.n0 + in_half + (n < half ? 0 : gemm.gemm.n / 2);
    factors[n] = in_half < tile.n_count ? gemm.w.global_scale.At(weight, column) : 0.0f;
  }
  __syncthreads();
  ops.ForEachSum([&](int n, float& sum) { sum *= factors[n]; });
  __syncthreads();
}

// The tiles of a thread block: add(tile, segment, ops) adds the products of one segment to the sums
// `ops`. If each segment has a scale of its own, sums wait at kept(), a float for each sum.
template <typename Config, typename Add, typename Kept>
__device__ __forceinline__ void ForEachTile(const QuantizedGemmSm80& gemm,
                                            typename Config::SharedMemory& shared, Add add,
                                            Kept kept) {
  typename Config::Work work(gemm.gemm, shared.schedule);
  typename Config::Ops ops;
  const Tile& tile = shared.schedule.tile;
  while (work.Next()) {
    ops.Clear();
    int index = -1, weight = -1;
    Segment segment;
    while (work.NextSegment(index, segment)) {
      const bool apart = Config::kSumsApart && SumsApart(gemm);
      if (apart) ops.Clear();
      add(tile, segment, ops);
      if (apart) {
        ScaleSums<Config>(gemm, tile, segment.weight, shared.result, ops);
        float* at = kept() + threadIdx.x;
        ops.ForEachSum([&](int, float& sum) {
          if (weight >= 0) sum += *at;
          *at = sum;
          at += Config::kThreads;
        });
      }
      weight = segment.weight;
    }
    if (gemm.w.global_scale.data != nullptr && weight >= 0 && !SumsApart(gemm)) {
      ScaleSums<Config>(gemm, tile, weight, shared.result, ops);
    }
    Config::Result::Store(gemm.gemm, tile, ops, shared.result);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    QuantizedGemmSm80Kernel(const __grid_constant__ QuantizedGemmSm80 gemm) {
  __builtin_assume(threadIdx.x < Config::kThreads);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(memory);
  unsigned char* ring = memory + Config::kRing;
  ForEachTile<Config>(
      gemm, shared,
      [&](const Tile& tile, const Segment& segment, typename Config::Ops& ops) {
        AddQuantizedSegment<Config>(gemm, tile, segment, shared.slices, ring, ops);
      },
      [&] { return reinterpret_cast<float*>(ring + Config::kStages * gemm.slice.bytes); });
}

}  // namespace jgg::device

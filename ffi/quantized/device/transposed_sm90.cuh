// x (T, N) @ W (N, K), K quantized in groups: the product that dx is. Weights are TransposedPacked
// or TransposedLines. They are decoded as for x (T, K) @ W^T, but sums run over n, and columns of
// the result are k. So each 8 x 8 of decoded values has to be turned.
//
// A stage has some slices of 64 n: x, and codes of 128 k, 64 for each warpgroup. Warpgroups write
// what they decode to shared memory, from where WGMMA takes it with k, its M side, contiguous.
// Where rows are few, warps turn what they decode in registers, and multiply by themselves: each
// has 16 n of every 64, and all 64 columns. At the end of a tile the four warps' sums are added.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/transposed_lines_sm90.cuh"
#include "quantized/device/transposed_packed_sm90.cuh"

namespace jgg::device {

// Traits of a tile derive from this.
template <typename Weights_>
struct TransposedTraitsSm90 : LoaderSm90, ProductsSm90, StoreSm90 {
  using Weights = Weights_;
  static constexpr bool kWarps = false;
  static constexpr bool kAdapters = false;  // adapter_sm90.cuh
};

template <typename Traits>
struct TransposedGemmSm90Config : Traits {
  using Traits::kRows, Traits::kCluster, Traits::kMostStages, Traits::kSlices, Traits::kWarps;
  using typename Traits::Weights;
  static constexpr int kBlocks = 1, kScheduledBlocks = 1;
  static constexpr int kBlocksPerSm = kWarps ? 2 : 1;
  static constexpr int kFeedRegisters = kWarps ? 48 : 56, kMultiplyRegisters = kWarps ? 96 : 224;
  static constexpr int kThreads = 384, kWorks = 4;
  static constexpr int kChunkL = kWarps ? kRows : 64;
  static constexpr int kChunkBytesL = kChunkL * 128;
  static constexpr int kLineL = 64;  // n of a line of 128 bytes
  static constexpr int kSliceBytesL = kRows * 128;
  static constexpr int kRowsBytes = 2 * kSliceBytesL;  // of two slices: see CopyRowsThread
  static constexpr int kCodeBytes = Weights::kCodeBytes;
  static constexpr int kScaleBytes = Weights::template kScaleBytes<kWarps>;
  static constexpr int kTurnedBytes = kWarps ? 0 : 64 * 128;
  using Epilogue = EpilogueSm90<32, false, true>;
  static constexpr int kStageBytes = kSlices * (kSliceBytesL + kCodeBytes + kScaleBytes);
  using Places = typename Weights::template Places<kWarps>;
  static constexpr int kFree = 228 * 1024 / kBlocksPerSm - 1024 - 2 * 1024 - 4 * kTurnedBytes -
                               2 * Epilogue::kBytes - sizeof(Places);
  static constexpr int kStages = std::min(kFree / kStageBytes, kMostStages);
  static_assert(kStages >= 2);

  struct SharedMemory {
    alignas(1024) char l[kStages][kSlices * kSliceBytesL];
    // Each warpgroup has two places for its columns: one is multiplied, the other written.
    alignas(1024) char turned[2][2][kWarps ? 16 : kTurnedBytes];
    alignas(Weights::kCodesAligned) char codes[kStages][kSlices][kCodeBytes];
    alignas(128) char scales[kStages][kSlices][std::max(kScaleBytes, 16)];
    alignas(1024) char staged[2][Epilogue::kBytes];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
    Places places;  // of scales that threads copy by themselves
  };
};

// Few rows: one thread copies all of a stage. x comes as one box, whose slices behind N are zeros;
// there the last slice's weights come again.
template <typename Config>
__device__ void CopyTransposedStages(const QuantizedGemmSm90& quantized,
                                     typename Config::SharedMemory& memory) {
  constexpr int kSlices = Config::kSlices;
  const GemmSm90& gemm = quantized.gemm;
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    typename Config::Weights::Columns columns(quantized, work);
    const bool half = Config::kRows > 8 && work.rows <= Config::kRows / 2;
    const CUtensorMap* l_map = half ? &gemm.rest_maps.l[0] : &gemm.l_map;
    const int bytes =
        kSlices * ((half ? Config::kSliceBytesL / 2 : Config::kSliceBytesL) + columns.Bytes());
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += kSlices) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, bytes);
      CopyBox<false>(l_map, full, memory.l[at.index], 0, work.l_row, slice * (64 / Config::kLineL));
#pragma unroll 1
      for (int s = 0; s < kSlices; ++s) {
        columns.Copy(full, memory.codes[at.index][s], memory.scales[at.index][s]);
        if (slice + s + 1 < work.slices) columns.Next();
      }
      at.Next();
    }
  });
}

// m64nNk16, A from shared memory with M contiguous, B (x) with K contiguous.
template <int kN, DType kX>
using TransposedProduct =
    WarpgroupProduct<std::conditional_t<kX == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>,
                     kN, cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::K>;

template <typename Config>
struct TransposedProducts {
  using Memory = typename Config::SharedMemory;
  using Writer = typename Config::Weights::Writer;
  static constexpr int kRows = Config::kRows, kBlockSums = kRows / 2;
  using Sums = float[kBlockSums];

  // All n of a tile. Leaves the ring behind the tile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    if (work.slices == 0) {
#pragma unroll
      for (int i = 0; i < kBlockSums; ++i) sums[i] = 0.0f;
      return;
    }
    auto loop = [&](auto n) { MultiplySlices<n.value>(quantized, memory, work, group, at, sums); };
    if (work.rows > 160) return loop(Constant<192>{});
    if (work.rows > 128) return loop(Constant<160>{});
    if (work.rows > 96) return loop(Constant<128>{});
    if (work.rows > 64) return loop(Constant<96>{});
    if (work.rows > 32) return loop(Constant<64>{});
    if (work.rows > 16) return loop(Constant<32>{});
    return loop(Constant<16>{});
  }

 private:
  // A warpgroup decodes a slice while the one before is multiplied. All its warps meet before they
  // multiply: then all have written their part of a slice, and none multiplies the slice whose
  // place comes next.
  template <int kN, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& sums) {
    Writer writer(quantized, work, group, memory.places);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[i] = 0.0f;
    const int slices = Uniform(work.slices);
    Stage here{Uniform(at.index), Uniform(at.parity)};
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t turned_first =
        TileDescriptor(Uniform(SharedAddress(memory.turned[group])), 64 * 128);
    int before = -1;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      Wait(&memory.full[here.index], here.parity);
      const typename Writer::Words words =
          writer.Load(memory.codes[here.index][0], memory.scales[here.index][0], group);
      // The products before may go on until here.
      WarpgroupWait<0>();
      if (slice > 0) Release<Config>(memory, before);
      // By the place in the ring, so that the next tile goes on with the other one.
      const int which = (here.index + static_cast<int>(here.parity) * Config::kStages) % 2;
      writer.Write(words, memory.turned[group][which]);
      FenceAsyncProxy();
      SyncSome(1 + group, 128);
      const uint32_t l_stage = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      const uint32_t turned = turned_first + which * (Config::kTurnedBytes >> 4);
      WarpgroupArrive();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Multiply<TransposedProduct<kN, Config::Weights::kX>>(turned + (i * 16 * 128 >> 4),
                                                             l_stage + (i * 32 >> 4), sums, true,
                                                             std::make_index_sequence<kN / 2>{});
      }
      WarpgroupCommit();
      before = here.index;
      here.Next();
    }
    WarpgroupWait<0>();
    Release<Config>(memory, before);
    at = here;
  }
};

// The sums of a warpgroup's warps, in their order: warp w keeps those of columns 16 * w and on.
// They go through `staged`, which the epilogue uses, too.
template <int kEights, int kStaged, int kSums>
__device__ void AddTransposedWarps(char (&staged)[kStaged], int group,
                                   const float (&sums)[4][4 * kEights], float (&result)[kSums]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  auto* const places = reinterpret_cast<float4*>(staged);  // [columns][warp][lane]
  static_assert(16 * 32 * sizeof(float4) <= sizeof(staged));
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    if (threadIdx.x % 128 == 0) WaitStored<0>();
    SyncSome(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* four = sums[i] + 4 * e;
      places[(i * 4 + warp) * 32 + lane] = make_float4(four[0], four[1], four[2], four[3]);
    }
    SyncSome(1 + group, 128);
    float4 sum = places[warp * 4 * 32 + lane];
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float4 part = places[(warp * 4 + w) * 32 + lane];
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    result[4 * e] = sum.x;
    result[4 * e + 1] = sum.y;
    result[4 * e + 2] = sum.z;
    result[4 * e + 3] = sum.w;
  }
#pragma unroll
  for (int i = 4 * kEights; i < kSums; ++i) result[i] = 0.0f;
  SyncSome(1 + group, 128);  // the epilogue may write there
}

template <typename Config>
struct TransposedFewRows {
  using Memory = typename Config::SharedMemory;
  static constexpr int kRows = Config::kRows, kBlockSums = kRows / 2;
  static_assert(kRows == 16);
  using Sums = float[kBlockSums];

  // As TransposedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    if (work.rows <= 8) {
      MultiplySlices<1>(quantized, memory, work, group, at, sums);
    } else {
      MultiplySlices<2>(quantized, memory, work, group, at, sums);
    }
  }

 private:
  template <int kEights, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& result) {
    typename Config::Weights::template Reader<Config::kSlices, kEights> reader(quantized, work,
                                                                               group);
    float sums[4][4 * kEights];  // of 16 columns each
#pragma unroll
    for (int i = 0; i < 16 * kEights; ++i) sums[i / (4 * kEights)][i % (4 * kEights)] = 0.0f;
    // A lane names a row of one of four 8 x 8 matrices of x. The first two are 8 rows and the first
    // and second 8 of the warp's n; the others are the next 8 rows, or, with 8 rows, the next
    // slice.
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    constexpr int kSliceBytes = Config::kSliceBytesL / 2 * kEights;
    const int further = lane / 16 * (kEights == 1 ? kSliceBytes : 1024);
    const uint32_t x_first = SharedAddress(memory.l) + lane % 8 * 128 +
                             ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16 + further;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      Wait(&memory.full[at.index], at.parity);
      const uint32_t x_stage = x_first + at.index * sizeof(memory.l[0]);
      uint32_t read = 0, x[4];
      const auto multiply = [&](auto range) {
#pragma unroll
        for (int s = 0; s < Config::kSlices; ++s) {
          const auto words = reader.template Load<range.value>(
              memory.codes[at.index][s], memory.scales[at.index][s], group, s);
          if (kEights == 2 || s % 2 == 0) LoadMatrices(x_stage + s * kSliceBytes, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t a[4];
            reader.template Read<range.value>(words, group, i, a);
            uint32_t turned[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              turned[m] = Config::Weights::kTurns ? Turned(a[m % 2 * 2 + m / 2]) : a[m];
            }
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              const int first = kEights == 1 ? s % 2 * 2 : 2 * e;
              MultiplyWarp<Config::Weights::kX>(turned, x[first], x[first + 1], sums[i] + 4 * e);
            }
          }
          if (s == Config::kSlices - 1) read = words.OfEachLoad() | x[0];
        }
      };
      using AnyScales = std::integral_constant<ScaleRange, ScaleRange::kAny>;
      using SmallScales = std::integral_constant<ScaleRange, ScaleRange::kSmall>;
      if constexpr (!Config::Weights::kAsksForSmall) {
        multiply(AnyScales{});
      } else if (reader.template AllSmall<Config::kSlices>(memory.scales[at.index], group)) {
        multiply(SmallScales{});
      } else {
        multiply(AnyScales{});
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
    AddTransposedWarps<kEights>(memory.staged[group], group, sums, result);
  }
};

// Who copies x where one thread does not copy all, and who makes a tile's sums. Kernels of weights
// that are not rounded have others (transposed_scaled_sm90.cuh).
template <typename Config, bool kScaled = Config::Weights::kScaled>
struct TransposedPartsOf {
  using Products =
      std::conditional_t<Config::kWarps, TransposedFewRows<Config>, TransposedProducts<Config>>;

  __device__ static void CopyRows(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int block) {
    CopyRowsThread<Config>(quantized, memory, block);
  }
};

// One of the two warpgroups that multiply.
template <typename Config>
__device__ void MultiplyTransposedWarpgroup(const QuantizedGemmSm90& quantized,
                                            typename Config::SharedMemory& memory, int group) {
  using P = typename TransposedPartsOf<Config>::Products;
  const GemmSm90& gemm = quantized.gemm;
  typename Config::Epilogue epilogue(gemm, memory.staged[group], 1 + group);
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    typename P::Sums sums;
    P::MultiplyTile(quantized, memory, work, group, at, sums);
    float factor = quantized.unit;
    if (quantized.global_scale.data != nullptr && work.weight >= 0) {
      factor *= quantized.global_scale.At(work.weight, 0);
    }
#pragma unroll
    for (int i = 0; i < P::kBlockSums; ++i) sums[i] *= factor;
    if constexpr (Config::kAdapters) {
      if (Uniform(HasAdapter(quantized, work)))
        AddAdapter<Config>(quantized, memory, group, at, sums);
    }
    if constexpr (!Config::Weights::kHasEpilogue && Config::kWarps) {
      const int lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 16 + lane / 4;
      StoreTwoColumns<Config::Weights::kSecondColumn>(
          gemm, work, lane, Config::Weights::ColumnOf(group, column), sums);
    } else {
      if constexpr (Config::kWarps) {
        if (!gemm.epilogue.Any()) return StoreFewRows(gemm, work, 64 * group, sums);
      }
      epilogue.Store(work, 64 * group, sums);
    }
  });
  WaitStored<0>();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    TransposedGemmSm90Kernel(const __grid_constant__ QuantizedGemmSm90 quantized) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const GemmSm90& gemm = quantized.gemm;
  const int block = Config::kCluster == 1 ? 0 : BlockInCluster();
  constexpr bool kStagesScales = Config::kWarps && Config::Weights::kStagesScales;
  if (threadIdx.x == 0) {
    constexpr int kWarps = kStagesScales ? kScaleWarps : 0;
    constexpr int kThreads = Config::kWarps ? 1 : 1 + Config::Weights::kCopiers;
    InitRings<Config>(memory, kThreads + kWarps * kArrivingLanes, kThreads + kWarps);
    Prefetch(&gemm.l_map);
    if (gemm.stores_boxes) Prefetch(&gemm.out_map);
  }
  if (threadIdx.x / 32 == 3) PrefetchSizes(gemm);
  SyncRings<Config>();
  if (threadIdx.x < 128) {
    GiveRegisters<Config::kFeedRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else if (kStagesScales && warp >= 2) {
      if constexpr (kStagesScales) {
        Config::Weights::Staged::template Copy<Config>(quantized, memory, warp - 2);
      }
    } else if (threadIdx.x % 32 == 0) {
      if constexpr (Config::kWarps) {
        if (warp == 1) CopyTransposedStages<Config>(quantized, memory);
      } else if (warp == 1) {
        TransposedPartsOf<Config>::CopyRows(quantized, memory, block);
      } else if (warp == 2) {
        Config::Weights::template CopyThread<Config, 0>(quantized, memory);
      } else if (Config::Weights::kCopiers > 1) {
        Config::Weights::template CopyThread<Config, 1>(quantized, memory);
      }
    }
    __syncwarp();
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyTransposedWarpgroup<Config>(quantized, memory, static_cast<int>(threadIdx.x) / 128 - 1);
  }
  if (Config::kCluster > 1) ClusterSync();
}

}  // namespace jgg::device

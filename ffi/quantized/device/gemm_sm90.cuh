// The kernel. As grouped_mm/device/gemm_sm90.cuh, but what a stage has of the weight is codes and
// scales of two slices of k (or four), and warpgroups decode them: some while tensor cores work on
// those before.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "grouped_mm/device/epilogue_sm90.cuh"
#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/adapter_sm90.cuh"
#include "quantized/device/few_rows_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

template <typename Epilogue>
constexpr int StagesThatFit(int bytes, int stage_bytes, int most) {
  const int stages = (bytes - 2 * Epilogue::kBytes) / stage_bytes;
  return stages < most ? stages : most;
}

// The weights of a tile, and what most tiles have in common: of the policies
// (grouped_mm/device/policies_sm90.cuh), all. Traits of a tile derive from this; they say kRows and
// kMostStages, and what they have instead (../gemm_sm90.cuh).
template <typename Weights_>
struct QuantizedTraitsSm90 : LoaderSm90, ProductsSm90, StoreSm90 {
  using Weights = Weights_;                 // packed_weights_sm90.cuh or linear_weights_sm90.cuh
  static constexpr int kBlocksPerSm = 1;    // thread blocks of a multiprocessor
  static constexpr bool kWarps = false;     // warps multiply by themselves: few_rows_sm90.cuh
  static constexpr int kMostPlanes = 1;     // planes of x that a stage has room for
  static constexpr int kMoreBytes = 0;      // of a stage, beside x, codes and scales
  static constexpr bool kAdapters = false;  // it may add a product of low rank: adapter_sm90.cuh
  static constexpr bool kHalves = false;    // two blocks of columns are of W's two halves
};

// A tile is kRows rows (of x) x kBlocks * 128 columns. A gated tile has 128 gates in block 0, and
// in block 1 the values that they let through.
template <typename Traits>
struct QuantizedGemmSm90Config : Traits {
  using Traits::kMostPlanes;
  using Traits::kRows, Traits::kBlocks, Traits::kMostStages, Traits::kBlocksPerSm, Traits::kWarps;
  using typename Traits::Weights;
  static constexpr int kScheduledBlocks = Traits::kHalves ? kOfBothHalves : kBlocks;
  // One thread copies all of a stage, and of x no more than a half or a quarter of the tile's rows
  // where there are no more. The pieces of prepacked weights are too many for it where WGMMA
  // multiplies and an SM has no other.
  static constexpr bool kCopiesStages =
      kWarps || (kRows <= 64 && (kBlocksPerSm > 1 || Weights::kScaleBytes == 0));
  // Whether stages may do with ScaleRange::kSmall: gated columns where the unit of sums stays the
  // same.
  static constexpr bool kHasSmall =
      kWarps && Weights::kHasSmall && (kBlocks == 1 || Weights::kSmallFactor == Weights::kFactor);
  static constexpr bool kSharesK = kWarps && kBlocks == 1;  // gemm.parts may be 2
  // Registers of a thread that feeds, and of one that multiplies: together as many as all begin
  // with.
  static constexpr int kFeedRegisters = kBlocksPerSm == 1 ? 56 : 48;
  static constexpr int kMultiplyRegisters = kBlocksPerSm == 1 ? 224 : 96;
  static constexpr int kThreads = 384, kWorks = 4;
  // The most slices of a stage: two, or, where warps multiply at most 16 rows, more.
  static constexpr int kSlices = kWarps ? Weights::kFewRowsSlices : 2;
  static constexpr int kChunkL = kRows < 32 ? kRows : kRows % 64 != 0 ? 32 : 64;
  static constexpr int kChunkBytesL = kChunkL * 128, kChunksL = kRows / kChunkL;
  static constexpr int kRowsBytes =  // of x
      (kRows < 32 ? kSlices : 2) * kMostPlanes * kChunksL * kChunkBytesL;
  static constexpr int kStageBytes =
      kRowsBytes + Traits::kMoreBytes +
      kSlices * kBlocks * (Weights::kCodeBytes + (Weights::kScaleBytes + 127) / 128 * 128);
  using PartialSums = std::conditional_t<kSharesK, SharedPartialSums, NoPartialSums>;
  // For stages and the epilogue, of so much shared memory of an SM.
  __device__ static constexpr int FreeOf(int kib) {
    return kib * 1024 / kBlocksPerSm - 1024 - static_cast<int>(sizeof(PartialSums)) - 1024;
  }
  // The L1 cache has the rest.
  static constexpr bool kLeavesMost =
      kWarps && StagesThatFit<EpilogueSm90<32, false, true>>(FreeOf(Weights::kFewRowsKib),
                                                             kStageBytes, kMostStages) >= 3;
  static constexpr int kFree = FreeOf(kRows > 64    ? 228
                                      : kLeavesMost ? Weights::kFewRowsKib
                                                    : Weights::kSmallTilesKib);
  // As many stages as fit. In large tiles smaller chunks of the result may leave room for one more.
  static constexpr int kStagesBesideSmall =
      StagesThatFit<EpilogueSm90<32, false, true>>(kFree, kStageBytes, kMostStages);
  static constexpr int kStagesBesideLarge =
      StagesThatFit<EpilogueSm90<kChunkL, false, true>>(kFree, kStageBytes, kMostStages);
  static constexpr bool kSmallChunks = kRows >= 128 && kStagesBesideSmall > kStagesBesideLarge;
  static constexpr int kStages = kSmallChunks ? kStagesBesideSmall : kStagesBesideLarge;
  using Epilogue = EpilogueSm90<kSmallChunks ? 32 : kChunkL, false, kRows <= 64>;
  static_assert(kStages >= 2);

  // The rows of x that are copied for a tile of so many rows, and the map that copies them.
  static constexpr int kMostBoxRows = kRows;
  __device__ static constexpr int BoxRows(int rows) {
    return kRows >= 32 && rows <= kRows / 4 ? kRows / 4 : rows <= kRows / 2 ? kRows / 2 : kRows;
  }
  __device__ static const CUtensorMap* BoxMap(const GemmSm90& gemm, int rows) {
    return kRows >= 32 && rows <= kRows / 4 ? &gemm.rest_maps.l[0]
           : rows <= kRows / 2              ? &gemm.rest_maps.l[1]
                                            : &gemm.l_map;
  }
  // Slices of a stage of such a tile, and bytes of x in each.
  __host__ __device__ static constexpr int StageSlices(int rows) {
    return rows <= 16 ? kSlices : 2;
  }
  __device__ static constexpr int SliceBytes(int rows) {
    return (!kCopiesStages ? kRows : BoxRows(rows)) * 128;
  }

  struct SharedMemory {
    alignas(1024) char l[kStages][kRowsBytes];
    alignas(1024) char codes[kStages][kBlocks][2][kSlices / 2 * Weights::kCodeBytes];
    alignas(128) char scales[kStages][kBlocks][2][kSlices / 2 * Weights::kScaleBytes];
    alignas(1024) char staged[2][Epilogue::kBytes];
    PartialSums parts;
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
  };
};

// Where one thread does not copy all, it copies x, and others each warpgroup's columns.
template <typename Config>
__device__ void CopyRowsThread(const QuantizedGemmSm90& quantized,
                               typename Config::SharedMemory& memory, int block) {
  constexpr bool kPair = Config::kCluster == 2;
  const GemmSm90& gemm = quantized.gemm;
  const int shared_columns = SharedColumns<Config>(gemm);
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const int chunks = (work.rows + Config::kChunkL - 1) / Config::kChunkL;
    const bool shares = work.out_column < shared_columns;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, Config::kSlices * chunks * Config::kChunkBytesL);
#pragma unroll 1
      for (int s = 0; s < Config::kSlices; ++s) {
        auto copy = [&](int i, auto multicast) {
          CopyBox<multicast.value>(
              &gemm.l_map, full,
              memory.l[at.index] + s * Config::kRowsBytes / 2 + i * Config::kChunkBytesL,
              (slice + s) * kSliceSm90, work.l_row + i * Config::kChunkL, 0);
        };
        if (shares) {
#pragma unroll 1
          for (int i = (block + s) % 2; i < chunks; i += 2) copy(i, Constant<kPair>{});
        } else {
#pragma unroll 1
          for (int i = 0; i < chunks; ++i) copy(i, Constant<0>{});
        }
      }
      at.Next();
    }
    if constexpr (Config::kAdapters) {
      if (HasAdapter(quantized, work)) CopyAdapter<Config>(quantized, memory, work, at);
    }
  });
}

// m64nNk16, A from registers, B (x) from shared memory.
template <int kN, DType kX = DType::kBF16>
struct RegisterProduct;

#define JGG_REGISTER_PRODUCT(N)                                                          \
  template <>                                                                            \
  struct RegisterProduct<N>                                                              \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,     \
                                                         cute::SM90::GMMA::Major::K> {}; \
  template <>                                                                            \
  struct RegisterProduct<N, DType::kF16>                                                 \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K,       \
                                                       cute::SM90::GMMA::Major::K> {};
JGG_REGISTER_PRODUCT(8)
JGG_REGISTER_PRODUCT(16)
JGG_REGISTER_PRODUCT(32)
JGG_REGISTER_PRODUCT(64)
JGG_REGISTER_PRODUCT(96)
JGG_REGISTER_PRODUCT(128)
JGG_REGISTER_PRODUCT(144)
JGG_REGISTER_PRODUCT(160)
JGG_REGISTER_PRODUCT(176)
JGG_REGISTER_PRODUCT(192)
#undef JGG_REGISTER_PRODUCT

template <int kN, DType kX, size_t... kIndex>
__device__ void MultiplyRegisters(const uint32_t* a, uint64_t b, float* sums, bool add,
                                  std::index_sequence<kIndex...>) {
  RegisterProduct<kN, kX>::fma(
      a[0], a[1], a[2], a[3], b, sums[kIndex]...,
      add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <typename Config>
struct QuantizedProducts {
  using Memory = typename Config::SharedMemory;
  using Reader = typename Config::Weights::template Reader<Config::kSlices>;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  static constexpr int kBlockSums = kRows / 2;
  using Sums = float[kBlocks][kBlockSums];

  // All k of a tile. Leaves the ring behind the tile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    if (work.slices == 0) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kBlockSums; ++i) sums[b][i] = 0.0f;
      }
      return;
    }
    auto loop = [&](auto n) { MultiplySlices<n.value>(quantized, memory, work, group, at, sums); };
    if constexpr (kRows > 160) {
      if (work.rows > 176) return loop(Constant<192>{});
      if (work.rows > 160) return loop(Constant<176>{});
    }
    if constexpr (kRows > 128) {
      if (work.rows > 144) return loop(Constant<160>{});
      if (work.rows > 128) return loop(Constant<144>{});
    }
    if constexpr (kRows > 96) {
      if (work.rows > 96) return loop(Constant<128>{});
    }
    if constexpr (kRows > 64) {
      if (work.rows > 64) return loop(Constant<96>{});
    }
    if constexpr (kRows > 32) {
      if (work.rows > 32) return loop(Constant<64>{});
    }
    if constexpr (kRows <= 64) {
      if (work.rows <= 8) return loop(Constant<8>{});
      if (work.rows <= 16) return loop(Constant<16>{});
    }
    return loop(Constant<32>{});
  }

 private:
  // Values of k, in 16s, that are decoded at a time: fewer where sums take most registers.
  static constexpr int kSteps = Config::kBlocksPerSm > 1 ? (kRows > 32 ? 1 : 2)
                                : kBlocks* kRows > 128   ? 2
                                                         : 4;
  static constexpr int kUnits = kSliceSm90 / 16 / kSteps;
  static constexpr bool kFewRows = kBlocks * kRows <= 64;
  // Scales multiply sums of a stage, for which there are registers, too.
  static constexpr bool kSums = Config::Weights::kScalesSums;
  static_assert(!kSums || kBlocks * kRows <= 128);
  // Codes of a stage are not loaded all at once: with two blocks per SM registers are few.
  static constexpr bool kLoadsLate = Config::kBlocksPerSm >= Config::Weights::kLoadsLateFrom;

  // Units of a stage, in order: slice, block of columns, part of the slice.
  template <int kN, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& sums) {
    const int column = work.out_column + 64 * group;
    Reader first_block(quantized, work, column);
    Reader second_block(quantized, work, column + quantized.gemm.n / 2);
    constexpr ScaleRange kRange = kSums ? ScaleRange::kSums : ScaleRange::kAny;
    uint32_t a[2][4 * kSteps];
    float parts[kBlocks][kSums ? kN / 2 : 1];  // sums of a stage
#pragma unroll
    for (int i = 0; i < kBlocks * kN / 2; ++i) sums[i / (kN / 2)][i % (kN / 2)] = 0.0f;
    // The same in all lanes, so that they can be uniform registers.
    const int slices = Uniform(work.slices);
    Stage here{Uniform(at.index), Uniform(at.parity)};
    const uint64_t l_first = WholeDescriptor(TileDescriptor(SharedAddress(memory.l), 64 * 128));
    int before = -1;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice += Config::kSlices) {
      Wait(&memory.full[here.index], here.parity);
      const uint64_t l_stage = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      if constexpr (kSums) {
        first_block.template NextScales<kRange>(0);
        if (kBlocks == 2) second_block.template NextScales<kRange>(0);
      }
      typename Reader::Words words[Config::kSlices][kBlocks];
      const auto load = [&](int s, int b) {
        words[s][b] = (b == 0 ? first_block : second_block)
                          .template Load<kFewRows, kRange>(memory.codes[here.index][b][group],
                                                           memory.scales[here.index][b][group], s);
      };
#pragma unroll
      for (int i = 0; i < Config::kSlices * kBlocks; ++i) {
        if (!kLoadsLate) load(i / kBlocks, i % kBlocks);
      }
#pragma unroll
      for (int unit = 0; unit < Config::kSlices * kBlocks * kUnits; ++unit) {
        const int s = unit / (kBlocks * kUnits), b = unit / kUnits % kBlocks;
        const int first = unit % kUnits * kSteps;
        if (kLoadsLate && first == 0) load(s, b);
        (b == 0 ? first_block : second_block)
            .template Read<kSteps, kFewRows, kRange>(words[s][b], s, first, a[unit % 2]);
        WarpgroupArrive();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          MultiplyRegisters<kN, Config::Weights::kX>(
              a[unit % 2] + 4 * i, l_stage + ((s * Config::SliceBytes(kN) + (first + i) * 32) >> 4),
              kSums ? parts[b] : sums[b], !kSums || s + first + i > 0,
              std::make_index_sequence<kN / 2>{});
        }
        WarpgroupCommit();
        WarpgroupWait<1>();
        // The operand of the unit before may be written again from here on.
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[1 - unit % 2][i])::"memory");
        if (!kSums && unit == 0 && slice > 0) Release<Config>(memory, before);
      }
      if constexpr (kSums) {
        WarpgroupWait<0>();
        Release<Config>(memory, here.index);
#pragma unroll
        for (int i = 0; i < kBlocks * kN / 2; ++i) {
          float& part = parts[i / (kN / 2)][i % (kN / 2)];
          asm volatile("" : "+f"(part)::"memory");
          const Reader& reader = i < kN / 2 ? first_block : second_block;
          sums[i / (kN / 2)][i % (kN / 2)] += reader.Scale(i / 2 % 2) * part;
        }
      }
      before = here.index;
      here.Next();
    }
    if constexpr (!kSums) {
      WarpgroupWait<0>();
      Release<Config>(memory, before);
    }
    at = here;
  }
};

// Who copies x where one thread does not copy all, and who makes a tile's sums. Kernels of
// ScaledWeights have others (scaled_rows_sm90.cuh, scaled_tiles_sm90.cuh).
template <typename Config, bool kScaled = Config::Weights::kScaled, bool kWarps = Config::kWarps>
struct PartsOf {
  using Products = std::conditional_t<kWarps, FewRowsProducts<Config>, QuantizedProducts<Config>>;

  __device__ static void CopyRows(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int block) {
    CopyRowsThread<Config>(quantized, memory, block);
  }
};

// One of the two warpgroups that multiply.
template <typename Config>
__device__ void MultiplyQuantizedWarpgroup(const QuantizedGemmSm90& quantized,
                                           typename Config::SharedMemory& memory, int group) {
  using P = typename PartsOf<Config>::Products;
  const GemmSm90& gemm = quantized.gemm;
  typename Config::Epilogue epilogue(gemm, memory.staged[group], 1 + group);
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    typename P::Sums sums;
    P::MultiplyTile(quantized, memory, work, group, at, sums);
    if constexpr (Config::kSharesK) {
      AddParts<Config>(gemm, memory, work, sums[0]);
      if (gemm.parts > 1 && BlockInCluster() > 0) return;
    }
    // Where an adapter may add to sums, they are always multiplied first. Else ptxas takes products
    // of tiles and those of adapters together, and serializes both (C7515).
    if (Config::kAdapters || quantized.unit != 1 || quantized.global_scale.data != nullptr) {
      const int column =
          work.out_column + 64 * group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int b = 0; b < Config::kBlocks; ++b) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = column + 8 * i + b * (gemm.n / 2);
          factor[i] = quantized.unit;
          if (quantized.global_scale.data != nullptr && work.weight >= 0 && c < gemm.n) {
            factor[i] *= quantized.global_scale.At(work.weight, c);
          }
        }
#pragma unroll
        for (int i = 0; i < P::kBlockSums; ++i) sums[b][i] *= factor[i / 2 % 2];
      }
    }
    if constexpr (Config::kAdapters) {
      if (Uniform(HasAdapter(quantized, work)))
        AddAdapter<Config>(quantized, memory, group, at, sums[0]);
    }
    if constexpr (Config::kBlocks == 1) {
      if constexpr (Config::kWarps) {
        if (!gemm.epilogue.Any()) return StoreFewRows(gemm, work, 64 * group, sums[0]);
      }
      // Tiles of fewer rows than a chunk have no options.
      if constexpr (Config::kRows % Config::kChunkL == 0) {
        epilogue.Store(work, 64 * group, sums[0]);
      }
    } else if constexpr (Config::kHalves) {
      StoreFewRows(gemm, work, 64 * group, sums[0]);
      Work other = work;
      other.out += gemm.n / 2;
      StoreFewRows(gemm, other, 64 * group, sums[1]);
    } else {
      epilogue.StoreGated(work, 64 * group, sums[0], sums[1]);
    }
  });
  WaitStored<0>();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    QuantizedGemmSm90Kernel(const __grid_constant__ QuantizedGemmSm90 quantized) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const GemmSm90& gemm = quantized.gemm;
  const int block = Config::kCluster == 1 && !Config::kSharesK ? 0 : BlockInCluster();
  if (threadIdx.x == 0) {
    memory.parts.Init();
    constexpr int kCopiers = Config::kCopiesStages ? 1 : 3;
    if constexpr (Config::Weights::kFloats) {
      constexpr int kWarps = Config::Weights::kRowWarps;
      InitRings<Config>(memory, kCopiers + kWarps * kArrivingLanes, kCopiers + kWarps);
    } else {
      InitRings<Config>(memory, kCopiers, kCopiers);
      Prefetch(Config::kCopiesStages ? &gemm.rest_maps.l[0] : &gemm.l_map);
    }
    if (gemm.stores_boxes) Prefetch(&gemm.out_map);
  }
  if (threadIdx.x / 32 == 3) PrefetchSizes(gemm);
  SyncRings<Config>(gemm.parts);
  if (threadIdx.x < 128) {
    GiveRegisters<Config::kFeedRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else if (Config::Weights::kFloats && warp >= 2) {
      if constexpr (Config::Weights::kFloats) {
        Config::Weights::template MakeRows<Config>(quantized, memory, warp - 2);
      }
    } else if (threadIdx.x % 32 == 0) {
      if constexpr (Config::kCopiesStages) {
        if (warp == 1) Config::Weights::template CopyStages<Config>(quantized, memory);
      } else if (warp == 1) {
        PartsOf<Config>::CopyRows(quantized, memory, block);
      } else {
        Config::Weights::template CopyColumns<Config>(quantized, memory, warp - 2);
      }
    }
    __syncwarp();
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyQuantizedWarpgroup<Config>(quantized, memory, static_cast<int>(threadIdx.x) / 128 - 1);
  }
  if (Config::kCluster > 1 || (Config::kSharesK && gemm.parts > 1)) ClusterSync();
}

}  // namespace jgg::device

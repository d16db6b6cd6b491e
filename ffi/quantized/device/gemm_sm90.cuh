// The kernel. As grouped_mm/device/gemm_sm90.cuh, but what a stage has of the weight is codes and
// scales of two slices of k, and warpgroups decode them: those of one slice while tensor cores work
// on the one before.
#pragma once

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "grouped_mm/device/epilogue_sm90.cuh"
#include "grouped_mm/device/products_sm90.cuh"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/weights_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

// A tile is kRows rows (of x) x kBlocks * 128 columns. Gated: block 0 has 128 gates, block 1 the
// values that they let through.
template <typename Weights_, int kRows_, int kBlocks_, int kStages_, int kCluster_,
          int kBlocksPerSm_ = 1>
struct QuantizedGemmSm90Config {
  using Element = cutlass::bfloat16_t;
  using Weights = Weights_;
  static constexpr int kRows = kRows_, kBlocks = kBlocks_, kStages = kStages_;
  static constexpr int kCluster = kCluster_, kBlocksPerSm = kBlocksPerSm_;
  // Of a thread that feeds, and one that multiplies: together what all begin with.
  static constexpr int kFeedRegisters = 56;
  static constexpr int kMultiplyRegisters = kBlocksPerSm == 1 ? 224 : 88;
  static constexpr int kThreads = 384, kWorks = 4, kSlices = 2;  // slices of a stage
  static constexpr int kChunkL = kRows < 64 ? 32 : 64;
  static constexpr int kChunkBytesL = kChunkL * 128, kChunksL = kRows / kChunkL;
  static constexpr int kCodeBytes = 2048, kScaleBytes = 256 * Weights::kScaleWords;  // of a tile
  using Epilogue = EpilogueSm90<kChunkL>;

  struct SharedMemory {
    alignas(1024) char l[kStages][kSlices][kChunksL * kChunkBytesL];
    alignas(128) char codes[kStages][kBlocks][2][kSlices][kCodeBytes];
    alignas(128) char scales[kStages][kBlocks][2][kSlices][kScaleBytes];
    alignas(1024) char staged[2][Epilogue::kBytes];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
  };
};

__device__ inline void CopyBytes(const void* from, uint64_t* barrier, void* to, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// One thread copies x, and one of each warpgroup's columns their codes and scales: copies are
// small, and a thread begins one in a few dozen cycles.
template <typename Config>
__device__ void CopyRowsThread(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                               int block) {
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const int chunks = (work.rows + Config::kChunkL - 1) / Config::kChunkL;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, Config::kSlices * chunks * Config::kChunkBytesL);
#pragma unroll 1
      for (int s = 0; s < Config::kSlices; ++s) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
          if (Config::kCluster > 1 && (i + s) % Config::kCluster != block) continue;
          CopyBox<Config::kCluster == 2>(
              &gemm.l_map, full, memory.l[at.index][s] + i * Config::kChunkBytesL,
              (slice + s) * kSliceSm90, work.l_row + i * Config::kChunkL, 0);
        }
      }
      at.Next();
    }
  });
}

template <typename Config>
__device__ void CopyWeightsThread(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int group) {
  constexpr int kCodes = Config::kCodeBytes, kScales = Config::kScaleBytes;
  const bool gated = IsGated(quantized.gemm.epilogue.activation);
  const int half = quantized.gemm.n / 128;  // tiles from a gate to what it lets through
  const int tiles = gated ? half : quantized.column_tiles;
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const int column = work.out_column / 64 + group;
    const bool exists = column < tiles;  // of the last 128 columns there may be only 64
    const int64_t first =
        (static_cast<int64_t>(work.weight) * quantized.column_tiles + column) * quantized.k_tiles;
    const char* codes = static_cast<const char*>(quantized.codes) + first * kCodes;
    const char* scales = static_cast<const char*>(quantized.scales) + first * kScales;
    const int64_t block = static_cast<int64_t>(half) * quantized.k_tiles;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, exists ? Config::kBlocks * 2 * (kCodes + kScales) : 0);
      // Half a stage is filled up with the same weights again, which meet zeros of x.
      const int copies = slice + 1 < work.slices ? 1 : 2, bytes = 2 / copies;
      for (int i = 0; i < (exists ? copies : 0); ++i) {
#pragma unroll
        for (int b = 0; b < Config::kBlocks; ++b) {
          CopyBytes(codes + b * block * kCodes, full, memory.codes[at.index][b][group][i],
                    bytes * kCodes);
          CopyBytes(scales + b * block * kScales, full, memory.scales[at.index][b][group][i],
                    bytes * kScales);
        }
      }
      codes += Config::kSlices * kCodes;
      scales += Config::kSlices * kScales;
      at.Next();
    }
  });
}

// m64nNk16, A from registers, B (x) from shared memory.
template <int kN>
struct RegisterProduct;

#define JGG_REGISTER_PRODUCT(N)                                                      \
  template <>                                                                        \
  struct RegisterProduct<N>                                                          \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, \
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

template <int kN, size_t... kIndex>
__device__ void MultiplyRegisters(const uint32_t* a, uint64_t b, float* sums, bool add,
                                  std::index_sequence<kIndex...>) {
  RegisterProduct<kN>::fma(
      a[0], a[1], a[2], a[3], b, sums[kIndex]...,
      add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <typename Config>
struct QuantizedProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Weights;
  static constexpr int kBlocks = Config::kBlocks, kRows = Config::kRows;
  static constexpr int kBlockSums = kRows / 2;
  using Sums = float[kBlocks][kBlockSums];

  // All k of a tile. Leaves the ring behind the tile.
  template <typename Stage>
  __device__ static void Tile(Memory& memory, const Work& work, int group, Stage& at, Sums& sums) {
    if (work.slices == 0) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kBlockSums; ++i) sums[b][i] = 0.0f;
      }
      return;
    }
    auto loop = [&](auto n) { Loop<n.value>(memory, work, group, at, sums); };
    if constexpr (kRows > 128) {
      if (work.rows > 176) return loop(Constant<192>{});
      if (work.rows > 160) return loop(Constant<176>{});
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
  static constexpr int kSteps = kBlocks * kRows > 128 || Config::kBlocksPerSm > 1 ? 2 : 4;
  static constexpr int kUnits = kSliceSm90 / 16 / kSteps;

  // Units of a stage, in order: slice, block of columns, part of the slice.
  template <int kN, typename Stage>
  __device__ static void Loop(Memory& memory, const Work& work, int group, Stage& at, Sums& sums) {
    uint32_t a[2][4 * kSteps];
    // The same in all lanes, so that they can be uniform registers.
    const int slices = __shfl_sync(0xffffffff, work.slices, 0);
    Stage here{__shfl_sync(0xffffffff, at.index, 0), __shfl_sync(0xffffffff, at.parity, 0)};
    const uint64_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    int before = -1;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice += Config::kSlices) {
      Wait(&memory.full[here.index], here.parity);
      const uint64_t l_stage = l_first + here.index * (sizeof(memory.l[0]) >> 4);
#pragma unroll
      for (int unit = 0; unit < Config::kSlices * kBlocks * kUnits; ++unit) {
        const int s = unit / (kBlocks * kUnits), b = unit / kUnits % kBlocks;
        const int first = unit % kUnits * kSteps;
        Decode(memory.codes[here.index][b][group][s], memory.scales[here.index][b][group][s], first,
               a[unit % 2]);
        WarpgroupArrive();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          MultiplyRegisters<kN>(
              a[unit % 2] + 4 * i, l_stage + ((s * sizeof(memory.l[0][0]) + (first + i) * 32) >> 4),
              sums[b], before >= 0 || s > 0 || first + i > 0, std::make_index_sequence<kN / 2>{});
        }
        WarpgroupCommit();
        WarpgroupWait<1>();
        // The operand of the unit before may be written again from here on.
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[1 - unit % 2][i])::"memory");
        if (unit == 0 && slice > 0) Release<Config>(memory, before);
      }
      before = here.index;
      here.Next();
    }
    WarpgroupWait<0>();
    Release<Config>(memory, before);
    at = here;
  }

  // kSteps x 16 k of this thread's.
  __device__ static void Decode(const char* codes, const char* scales, int first, uint32_t* a) {
    constexpr int kWords = Weights::kScaleWords;
    const int thread = threadIdx.x % 128, pair = thread / 32 * 8 + thread % 32 / 4;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(codes) + 4 * thread + first;
    const uint32_t* scale_words = reinterpret_cast<const uint32_t*>(scales) + pair * 2 * kWords;
    uint32_t step[kSteps], scale[2][kWords];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) step[i] = words[i];
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) scale[i / kWords][i % kWords] = scale_words[i];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Weights::template Decode<(kBlocks * kRows <= 64)>(step[i], first + i, scale[0], scale[1],
                                                        a + 4 * i);
    }
  }
};

// One of the two warpgroups that multiply.
template <typename Config>
__device__ void MultiplyQuantizedWarpgroup(const QuantizedGemmSm90& quantized,
                                           typename Config::SharedMemory& memory, int group) {
  using P = QuantizedProducts<Config>;
  const GemmSm90& gemm = quantized.gemm;
  const bool gated = IsGated(gemm.epilogue.activation);
  typename Config::Epilogue epilogue(gemm, memory.staged[group], 1 + group);
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    typename P::Sums sums;
    P::Tile(memory, work, group, at, sums);
    if (Config::Weights::kFactor != 1 || quantized.global_scale != nullptr) {
      const int column =
          work.out_column + 64 * group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int b = 0; b < Config::kBlocks; ++b) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = column + 8 * i + (b == 0 ? 0 : gated ? gemm.n / 2 : 128);
          factor[i] = Config::Weights::kFactor;
          if (quantized.global_scale != nullptr && work.weight >= 0 && c < gemm.n) {
            factor[i] *= quantized.global_scale[work.weight * quantized.global_scale_group +
                                                c * quantized.global_scale_column];
          }
        }
#pragma unroll
        for (int i = 0; i < P::kBlockSums; ++i) sums[b][i] *= factor[i / 2 % 2];
      }
    }
    if constexpr (Config::kBlocks == 1) {
      epilogue.Store(work, 64 * group, sums[0]);
    } else {
      epilogue.template StoreFused<true>(work, 64 * group, sums[0], sums[1]);
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
  const int block = Config::kCluster == 1 ? 0 : BlockInCluster();
  if (threadIdx.x == 0) {
    InitRings<Config>(memory, 3, 3);
    Prefetch(&gemm.l_map);
    if (gemm.stores_boxes) Prefetch(&gemm.out_map);
  }
  SyncRings<Config>();
  if (threadIdx.x < 128) {
    GiveRegisters<Config::kFeedRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      ScheduleWarp<Config>(gemm, memory, block);
    } else {
      if (threadIdx.x % 32 == 0) {
        if (warp == 1) CopyRowsThread<Config>(gemm, memory, block);
        if (warp >= 2) CopyWeightsThread<Config>(quantized, memory, warp - 2);
      }
      __syncwarp();
    }
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyQuantizedWarpgroup<Config>(quantized, memory, static_cast<int>(threadIdx.x) / 128 - 1);
  }
  if (Config::kCluster > 1) ClusterSync();
}

}  // namespace jgg::device

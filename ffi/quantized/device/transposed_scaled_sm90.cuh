// As transposed_sm90.cuh, of float32 x and weights that are not rounded, in layout "sm90". Scales
// are of n, over which sums run, so they cannot multiply sums.
//
// Few rows: scales multiply x (scaled_x_sm90.cuh), which comes in float32. A warp has 16 n of every
// 64, and at the end of a tile the four warps' sums are added.
//
// Many rows: weights are decoded to float32, and to three planes in shared memory. x comes in three
// planes. Planes i and j are multiplied where i + j < 3, which leaves out 2^-24 of a product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "quantized/device/scaled_weights_sm90.cuh"
#include "quantized/device/scaled_x_sm90.cuh"
#include "quantized/device/transposed_sm90.cuh"
#include "quantized/device/value_planes.cuh"

namespace jgg::device {

// Traits of a tile derive from this.
template <typename Weights_>
struct TransposedScaledTraitsSm90 : LoaderSm90, ProductsSm90, StoreSm90 {
  using Weights = Weights_;               // TransposedTiles
  using Tiles = typename Weights::Tiles;  // ScaledWeights
  static constexpr bool kWarps = false;
  static constexpr bool kAdapters = false;  // adapter_sm90.cuh
};

template <typename Config>
struct TransposedScaledFewRows;
template <typename Config>
struct TransposedScaledProducts;

template <typename Traits>
struct TransposedScaledSm90Config : Traits {
  using Traits::kRows, Traits::kCluster, Traits::kMostStages, Traits::kWarps;
  using typename Traits::Tiles, typename Traits::Weights;
  static constexpr int kBlocks = 1, kScheduledBlocks = 1;
  static constexpr int kBlocksPerSm = kWarps ? 2 : 1;
  static constexpr int kFeedRegisters = kWarps ? 48 : 56, kMultiplyRegisters = kWarps ? 96 : 224;
  static constexpr int kThreads = 384, kWorks = 4;
  static constexpr int kSlices = kWarps ? 2 : 1;
  static constexpr int kLineL = kWarps ? 32 : 64;  // n of a line of 128 bytes
  static constexpr int kChunkL = kWarps ? kRows : 64;
  static constexpr int kChunkBytesL = kChunkL * 128;
  static constexpr int kPlaneBytesL = kRows * 128;
  static constexpr int kSliceBytesL = kPlaneBytesL * (kWarps ? 2 : kValuePlanes);
  // Codes and scales of a slice are those of two tiles.
  static constexpr int kCodeBytes = 2 * Tiles::kTileCodes, kScaleBytes = Tiles::kScaleBytes;
  static constexpr int kTurnedBytes = 64 * 128;  // of a plane of a warpgroup's weights
  using Epilogue = EpilogueSm90<32, false, true>;
  // Many rows: sums take turns with the weights that they are made of.
  static constexpr int kStagedBytes = kWarps ? Epilogue::kBytes : kValuePlanes * kTurnedBytes;
  static constexpr int kStageBytes = kSlices * (kSliceBytesL + kCodeBytes + kScaleBytes);
  static constexpr int kFree = 228 * 1024 / kBlocksPerSm - 1024 - 2 * 1024 - 2 * kStagedBytes;
  static constexpr int kStages = std::min(kFree / kStageBytes, kMostStages);
  static_assert(kStages >= 2 && kStagedBytes >= Epilogue::kBytes);
  template <typename Config>
  using ScaledProducts =
      std::conditional_t<kWarps, TransposedScaledFewRows<Config>, TransposedScaledProducts<Config>>;

  struct SharedMemory {
    alignas(1024) char l[kStages][kSlices * kSliceBytesL];
    alignas(1024) char staged[2][kStagedBytes];
    alignas(128) char codes[kStages][kSlices][kCodeBytes];
    alignas(128) char scales[kStages][kSlices][kScaleBytes];
    alignas(16) Work works[kWorks];
    uint64_t full[kStages], empty[kStages];
    uint64_t work_full[kWorks], work_empty[kWorks];
  };
};

// ---- many rows

// One thread copies all planes of x.
template <typename Config>
__device__ void CopyTransposedPlanes(const GemmSm90& gemm, typename Config::SharedMemory& memory,
                                     int block) {
  constexpr bool kPair = Config::kCluster == 2;
  const int shared_columns = SharedColumns<Config>(gemm);
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    const int chunks = (work.rows + Config::kChunkL - 1) / Config::kChunkL;
    const bool shares = work.out_column < shared_columns;
#pragma unroll 1
    for (int slice = 0; slice < work.slices; ++slice) {
      uint64_t* full = &memory.full[at.index];
      Wait(&memory.empty[at.index], at.parity ^ 1);
      ArriveExpecting(full, kValuePlanes * chunks * Config::kChunkBytesL);
#pragma unroll 1
      for (int i = 0; i < kValuePlanes * chunks; ++i) {
        const int plane = i % kValuePlanes, chunk = i / kValuePlanes;
        char* to = memory.l[at.index] + plane * Config::kPlaneBytesL + chunk * Config::kChunkBytesL;
        const int k = slice * kSliceSm90, row = work.l_row + chunk * Config::kChunkL;
        if (!shares) {
          CopyBox<false>(&gemm.l_map, full, to, k, row, plane);
        } else if (i % 2 == block) {
          CopyBox<kPair>(&gemm.l_map, full, to, k, row, plane);
        }
      }
      at.Next();
    }
  });
}

template <typename Config>
struct TransposedScaledProducts {
  using Memory = typename Config::SharedMemory;
  using Weights = typename Config::Tiles;
  using Codes = typename Weights::Codes;
  static constexpr int kRows = Config::kRows, kBlockSums = kRows / 2;
  static_assert(kRows == 128 && Config::kSlices == 1);
  using Sums = float[kBlockSums];

  // As TransposedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlockSums; ++i) sums[i] = 0.0f;
    auto loop = [&](auto n) { MultiplySlices<n.value>(quantized, memory, work, group, at, sums); };
    if (work.rows > 96) return loop(Constant<128>{});
    if (work.rows > 64) return loop(Constant<96>{});
    if (work.rows > 32) return loop(Constant<64>{});
    return loop(Constant<32>{});
  }

 private:
  // A warpgroup decodes a slice while the other multiplies one. As SplitProducts, tensor cores add
  // up one slice only, and in it the largest products come last.
  template <int kN, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& totals) {
    const typename Weights::Reader reader(quantized.packed);
    const int slices = Uniform(work.slices);
    Stage here{Uniform(at.index), Uniform(at.parity)};
    const uint32_t l_first = TileDescriptor(SharedAddress(memory.l), 64 * 128);
    const uint32_t turned_first =
        TileDescriptor(Uniform(SharedAddress(memory.staged[group])), 64 * 128);
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      // Products, or the epilogue's copies, have read the place.
      if (slice == 0 && threadIdx.x % 128 == 0) WaitStored<0>();
      SyncSome(1 + group, 128);
      Wait(&memory.full[here.index], here.parity);
      Decode(reader, memory.codes[here.index][0], memory.scales[here.index][0], group,
             memory.staged[group]);
      FenceAsyncProxy();
      SyncSome(1 + group, 128);
      const uint32_t l_stage = l_first + here.index * (sizeof(memory.l[0]) >> 4);
      float sums[kN / 2];
      WarpgroupArrive();
#pragma unroll
      for (int order = kValuePlanes - 1; order >= 0; --order) {
#pragma unroll
        for (int i = 0; i <= order; ++i) {
#pragma unroll
          for (int step = 0; step < kSliceSm90 / 16; ++step) {
            const int l_offset = i * Config::kPlaneBytesL + step * 32;
            const int turned_offset = (order - i) * Config::kTurnedBytes + step * 16 * 128;
            Multiply<TransposedProduct<kN, DType::kBF16>>(
                turned_first + (turned_offset >> 4), l_stage + (l_offset >> 4), sums,
                order < kValuePlanes - 1 || i > 0 || step > 0, std::make_index_sequence<kN / 2>{});
          }
        }
      }
      WarpgroupCommit();
      WarpgroupWait<0>();
      Release<Config>(memory, here.index);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) totals[i] += sums[i];
      here.Next();
    }
    at = here;
  }

  // Puts a slice's planes where TransposedProducts puts its values.
  __device__ static void Decode(const typename Weights::Reader& reader, const char* codes,
                                const char* scales, int group, char* turned) {
    const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane % 16;
    char* const line_at = turned + line * 128;
    uint32_t words[Weights::kWords];
    reader.Load(codes, group, words);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      float scale[2], bias[2];
      reader.Scales(scales, group, step, scale, bias);
      uint32_t numbers[4], planes[4][kValuePlanes];
      Codes::Numbers(words, step, numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float number = Half<DType::kBF16>(numbers[i], half);
          values[half] = Codes::kHasBiases ? MultiplyAdd(number, scale[i % 2], bias[i % 2])
                                           : number * scale[i % 2];
        }
        PlanesOfPair(values[0], values[1], planes[i]);
      }
      char* const to = line_at + ((2 * step + lane / 16) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < kValuePlanes; ++i) {
        StoreMatrices<false>(to + i * Config::kTurnedBytes, planes[0][i], planes[1][i],
                             planes[2][i], planes[3][i]);
      }
    }
  }
};

// ---- few rows

template <typename Config>
struct TransposedScaledFewRows {
  using Memory = typename Config::SharedMemory;
  using Tiles = typename Config::Tiles::Tiles;
  static constexpr int kBlockSums = 8;  // for 16 rows, as the epilogue has them
  using Sums = float[kBlockSums];

  // As TransposedProducts::MultiplyTile.
  template <typename Stage>
  __device__ static void MultiplyTile(const QuantizedGemmSm90& quantized, Memory& memory,
                                      const Work& work, int group, Stage& at, Sums& sums) {
    // A branch between groups would keep the compiler from mixing what is on its two sides.
    if constexpr (Tiles::Codes::kHasBiases) {
      const int groups = quantized.packed.tile_groups;
      if (groups == 2) return MultiplySlices<2>(quantized, memory, work, group, at, sums);
      if (groups == 4) return MultiplySlices<4>(quantized, memory, work, group, at, sums);
    }
    MultiplySlices<1>(quantized, memory, work, group, at, sums);
  }

 private:
  template <int kGroups, typename Stage>
  __device__ static void MultiplySlices(const QuantizedGemmSm90& quantized, Memory& memory,
                                        const Work& work, int group, Stage& at, Sums& result) {
    using Product = ScaledXProduct<Tiles, kGroups>;
    static_assert(Config::kRows == Product::kRows);
    Product product(quantized.packed);
#pragma unroll 1
    for (int slice = 0; slice < work.slices; slice += Config::kSlices) {
      Wait(&memory.full[at.index], at.parity);
      uint32_t read = 0;
#pragma unroll 1  // there are registers for one at a time
      for (int s = 0; s < Config::kSlices; ++s) {
        read |= product.Multiply(memory.l[at.index] + s * 2 * Product::kBoxBytes,
                                 memory.codes[at.index][s], memory.scales[at.index][s], group);
      }
      __syncwarp();
      Release<Config>(memory, at.index + ZeroAfter(read));
      at.Next();
    }
    AddTransposedWarps<1>(memory.staged[group], group, product.Finish(), result);
  }
};

template <typename Config>
struct TransposedPartsOf<Config, true> {
  using Products = typename Config::template ScaledProducts<Config>;

  __device__ static void CopyRows(const QuantizedGemmSm90& quantized,
                                  typename Config::SharedMemory& memory, int block) {
    CopyTransposedPlanes<Config>(quantized.gemm, memory, block);
  }
};

}  // namespace jgg::device

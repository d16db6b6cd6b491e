// Both products with quantized weights (quantized/up_and_down_sm90.h), with the tiles of 16 rows of
// gemm_sm90.cuh.
#pragma once

#include <cstdint>

#include "grouped_mm/device/up_and_down_sm90.cuh"
#include "quantized/device/gemm_sm90.cuh"
#include "quantized/device/packed_weights_sm90.cuh"
#include "quantized/up_and_down_sm90.h"

namespace jgg::device {

template <typename Traits>
struct UpAndDownSm90Config : QuantizedGemmSm90Config<Traits> {
  static constexpr int kWorks = 1;  // a block does not take tiles that others could begin earlier
  static_assert(Traits::kHalves && Traits::kRows == 16);
};

// One thread.
template <typename Config>
__device__ void CopyBothStages(const UpAndDownSm90& both, typename Config::SharedMemory& memory) {
  using Copier = typename Config::Weights::template StageCopier<Config>;
  const int warps = WarpsOfRows(both.products[0].gemm);
  Place<Config::kStages> at;
  ForEachWork<Config, false>(memory, [&](const Work& work) {
    if (ProductOf(work) == 1) {
      WaitForRows(both.turns, work, warps);
    }
    Copier(both.products[ProductOf(work)]).Copy(memory, work, at);
  });
}

// One of the two warpgroups that multiply.
template <typename Config>
__device__ void MultiplyBoth(const UpAndDownSm90& both, typename Config::SharedMemory& memory,
                             int group) {
  using P = typename PartsOf<Config>::Products;
  constexpr int kSums = P::kBlockSums;
  Place<Config::kStages> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    const int which = Uniform(ProductOf(work));
    const QuantizedGemmSm90& quantized = both.products[which];
    const GemmSm90& gemm = quantized.gemm;
    typename P::Sums sums;
    P::MultiplyTile(quantized, memory, work, group, at, sums);
    const int column =
        work.out_column + 64 * group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = column + 8 * i + b * (gemm.n / 2);
        factor[i] = quantized.unit;
        if (quantized.global_scale.data != nullptr && c < gemm.n) {
          factor[i] *= quantized.global_scale.At(work.weight, c);
        }
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[b][i] *= factor[i / 2 % 2];
    }
    if (which == 0) {
      if (gemm.epilogue.rounds_preactivation) {
#pragma unroll
        for (int i = 0; i < 2 * kSums; ++i) {
          float& sum = sums[i / kSums][i % kSums];
          sum = static_cast<float>(cutlass::bfloat16_t(sum));
        }
      }
      Gate<false, kSums>(gemm.epilogue.activation, sums[0], sums[1]);
      StoreFewRows(gemm, work, 64 * group, sums[0]);
      TellStored(both.turns, work);
    } else {
      StoreFewRows(gemm, work, 64 * group, sums[0]);
      Work other = work;
      other.out += gemm.n / 2;
      StoreFewRows(gemm, other, 64 * group, sums[1]);
    }
  });
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    UpAndDownSm90Kernel(const __grid_constant__ UpAndDownSm90 both) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<typename Config::SharedMemory*>(bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    InitRings<Config>(memory, 1, 1);
    Prefetch(&both.products[0].gemm.rest_maps.l[0]);
    Prefetch(&both.products[1].gemm.rest_maps.l[0]);
  }
  if (warp == 3) PrefetchSizes(both.products[0].gemm);
  SyncRings<Config>();
  if (warp < 4) {
    GiveRegisters<Config::kFeedRegisters>();
    if (warp == 0) {
      TakeTiles<Config>(both.products[0].gemm, both.products[1].gemm, both.turns, memory);
    } else if (warp == 1 && threadIdx.x % 32 == 0) {
      CopyBothStages<Config>(both, memory);
    }
    __syncwarp();
  } else {
    TakeRegisters<Config::kMultiplyRegisters>();
    MultiplyBoth<Config>(both, memory, warp / 4 - 1);
  }
}

}  // namespace jgg::device

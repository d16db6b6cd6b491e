// Host side of the Hopper kernel: the tiles that plans name (plan.h), and their launch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "common/dispatch.h"
#include "common/processors.h"
#include "grouped_mm/device/gemm_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg {

// A kernel is three policies: Loader, Products and Store (device/policies_sm90.cuh). Those of mm
// and wgrad follow, by the rows of a tile: they have as many stages as shared memory holds.
// Operands is a DenseSm90 or a PlanesSm90, from which Products derives. Both name the elements'
// type, and so does the kernel then. That matters: nvcc makes other code of kernels whose names
// hold "cutlass".
template <typename Kernel>
using ConfigSm90 = device::GemmSm90Config<typename Kernel::Loader, typename Kernel::Products,
                                          typename Kernel::Store>;

// Operands of 16 bits.
template <typename Element_, bool kLKMajor_, bool kRKMajor_>
struct DenseSm90 : device::ProductsSm90 {
  using Element = Element_;
  static constexpr bool kLKMajor = kLKMajor_, kRKMajor = kRKMajor_;
};

// Tiles of few rows.
template <typename Operands, int kRows_, int kStages_>
struct SmallRowsSm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = kStages_;
  };
  struct Products : Operands {
    static constexpr int kRows = kRows_;
  };
  using Store = device::StoreSm90;
};
template <typename Operands>
using Rows32Sm90 = SmallRowsSm90<Operands, 32, 10>;
template <typename Operands>
using Rows64Sm90 = SmallRowsSm90<Operands, 64, 8>;
template <typename Operands>
using Rows128Sm90 = SmallRowsSm90<Operands, 128, 6>;

template <typename Operands>
struct Rows256Sm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = 4, kCluster = 2;
  };
  struct Products : Operands {
    static constexpr int kRows = 256;
  };
  using Store = device::StoreSm90;
};
template <typename Operands>
struct Rows288Sm90 : Rows256Sm90<Operands> {
  struct Products : Operands {
    static constexpr int kRows = 288;
  };
};

// float32 results take the room of a stage.
template <typename Operands>
struct WideRows256Sm90 : Rows256Sm90<Operands> {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = 3, kCluster = 2;
  };
  struct Store : device::StoreSm90 {
    static constexpr bool kWide = true;
  };
};

template <typename Operands>
struct GatedRows32Sm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = 5;
  };
  struct Products : Operands {
    static constexpr int kRows = 32, kBlocks = 2;
  };
  using Store = device::StoreSm90;
};
template <typename Operands>
struct GatedRows128Sm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = 4, kCluster = 2;
  };
  struct Products : Operands {
    static constexpr int kRows = 128, kBlocks = 2;
  };
  using Store = device::StoreSm90;
};

// A gated activation of rounded sums, of 64 gates and what they let through.
struct GateApartStoreSm90 : device::StoreSm90 {
  static constexpr bool kGates = true;
};
template <typename Operands>
struct GateApartRows256Sm90 : Rows256Sm90<Operands> {
  using Store = GateApartStoreSm90;
};

// float32 operands in planes. Element is bfloat16: a parameter, so that kernels' names have it.
template <typename Element, bool kLKMajor, bool kRKMajor, int kPlanes_>
struct PlanesSm90 : DenseSm90<Element, kLKMajor, kRKMajor> {
  static constexpr int kPlanes = kPlanes_;
};
template <typename Operands, int kRows_, int kCluster_ = 1>
struct PlanesRowsSm90 {
  struct Loader : device::LoaderSm90 {
    static constexpr int kStages = Operands::kPlanes == 3 ? 2 : 3, kCluster = kCluster_;
  };
  struct Products : Operands {
    static constexpr int kRows = kRows_;
  };
  using Store = device::StoreSm90;
};

// The result as TMA writes it.
template <typename Config>
TensorMapSpec DescribeOutSm90(const GemmSm90& gemm) {
  const int64_t columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
  return {gemm.out,
          gemm.out_dtype,
          Config::kTransposed ? gemm.m : columns,
          Config::kTransposed ? gemm.n
          : gemm.wgrad        ? gemm.m
                              : gemm.rows_y,
          gemm.wgrad ? gemm.groups : 1,
          gemm.out_line,
          gemm.wgrad ? gemm.out_group : gemm.out_line,
          Config::Epilogue::kChunk,
          Config::kWide ? 32 : 64};
}

// Whether the warp that stores can take the result: it only rounds, and TMA writes it; or it only
// adds, and that is what TMA can do of float32, matrix by matrix.
template <typename Config>
bool HasStoreWarpSm90(const GemmSm90& gemm) {
  const bool wide = gemm.out_dtype == DType::kF32;
  const bool adds = wide && gemm.wgrad && gemm.epilogue.accumulate;
  return Config::kStoreWarp && wide == Config::kWide && (adds || !gemm.epilogue.Any()) &&
         TensorMapProblem(DescribeOutSm90<Config>(gemm)) == nullptr;
}

// The tensor map of the result, where it can have one.
template <typename Config>
cudaError_t EncodeOutSm90(GemmSm90& gemm) {
  if (Config::kGates) return cudaSuccess;  // its warps use none
  TensorMapSpec out = DescribeOutSm90<Config>(gemm);
  gemm.stores_boxes =
      (gemm.out_dtype == DType::kF32) == Config::kWide && TensorMapProblem(out) == nullptr;
  gemm.store_warp = HasStoreWarpSm90<Config>(gemm);
  if (!gemm.stores_boxes) return cudaSuccess;
  if (cudaError_t error = EncodeTensorMap(out, &gemm.out_map)) return error;
  if (void* data = gemm.epilogue.preactivation) {
    // Its halves have the shape of the result, so their tiles end where those of the result do.
    TensorMapSpec halves = out;
    halves.data = data;
    halves.groups = 2;
    halves.line = gemm.n;
    halves.group = gemm.n / 2;
    if (cudaError_t error = EncodeTensorMap(halves, &gemm.mm_maps.preactivation)) return error;
  }
  out.box_lines = 8;
  return gemm.store_warp && !gemm.wgrad ? EncodeTensorMap(out, &gemm.mm_maps.out_rest)
                                        : cudaSuccess;
}

// At most this many tiles exist, whatever the sizes: each segment may begin and end a tile, and
// have a gap before it; of sizes of all groups, only those that have rows, and the rows behind all.
template <typename Config>
int64_t MostTilesSm90(const GemmSm90& gemm) {
  const bool gated = IsGated(gemm.epilogue.activation);
  const int64_t columns = gated ? gemm.n / 2 : gemm.n;
  const int64_t tile_columns = (Config::kGates ? 64 * Config::kBlocks
                                : gated        ? 128
                                               : 128 * Config::kBlocks) *
                               (Config::kStacked ? 1 : Config::kCluster);
  const Metadata& metadata = gemm.metadata;
  const int64_t more = metadata.HasSizeOfEach(gemm.groups)
                           ? std::min<int64_t>(metadata.count, gemm.rows_y) + 1
                           : 3 * (metadata.count + 1);
  const int64_t m_tiles =
      gemm.wgrad ? (gemm.m + Config::kRows - 1) / Config::kRows * static_cast<int64_t>(gemm.groups)
                 : gemm.rows_y / Config::kRows + more;
  return m_tiles * ((columns + tile_columns - 1) / tile_columns);
}

// Launch a kernel on as many clusters as the device holds at a time, which share out the tiles.
// `prepare(tiles, clusters)` comes before that, and may change what `parameters` refers to.
template <typename Config, auto kernel, typename Parameters, typename Prepare>
cudaError_t LaunchTilesSm90(cudaStream_t stream, const GemmSm90& gemm, const Parameters& parameters,
                            Prepare prepare) {
  constexpr int kBytes = sizeof(typename Config::SharedMemory);
  static_assert(kBytes <= 227 * 1024);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  const int blocks = Config::kCluster * gemm.parts;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.blockDim = Config::kThreads;
  launch.dynamicSmemBytes = kBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;

  // Clusters that fit the device, asked once per device and size.
  static std::array<std::array<std::atomic<int>, 64>, kMostParts> all_known{};
  auto& known = all_known[gemm.parts - 1];
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  int clusters = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (clusters == 0) {
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
      return error;
    }
    launch.gridDim = blocks;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch)) {
      return error;
    }
    clusters = std::max(clusters, 1);
    if (device < 64) known[device].store(clusters, std::memory_order_relaxed);
  }
  const int64_t tiles = MostTilesSm90<Config>(gemm);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (tiles == 0) return cudaSuccess;
  prepare(tiles, clusters);
  launch.gridDim = static_cast<unsigned>(std::min<int64_t>(tiles, clusters) * blocks);
  return cudaLaunchKernelEx(&launch, kernel, parameters);
}

template <typename Config, auto kernel, typename Parameters>
cudaError_t LaunchTilesSm90(cudaStream_t stream, const GemmSm90& gemm,
                            const Parameters& parameters) {
  return LaunchTilesSm90<Config, kernel>(stream, gemm, parameters, [](int64_t, int) {});
}

// A wgrad of short sums, whose result is most of the traffic and several times what L2 holds. The
// result should leave L2 first, in about the order in which it lies in memory. Longer sums have
// more use of L2 for both operands.
inline bool StoresMostly(const GemmSm90& gemm) {
  const int64_t groups = gemm.groups;
  return gemm.wgrad && groups * gemm.out_group > (1 << 26) && gemm.rows_x <= 192 * groups;
}

// The tensor maps of the operands that TMA copies.
template <typename Config>
cudaError_t EncodeOperandsSm90(GemmSm90& gemm, const OperandsSm90& operands) {
  TensorMapSpec l = operands.l, r = operands.r;
  l.box_lines = Config::kLKMajor ? Config::kChunkL : device::kSliceSm90;
  r.box_lines = 64;
  constexpr bool kL = Config::kByList != device::ByList::kRowsOfL;
  constexpr bool kR = Config::kByList != device::ByList::kLinesOfR;
  if (kL) {
    if (cudaError_t error = EncodeTensorMap(l, &gemm.l_map)) return error;
  }
  if (kR) {
    if (cudaError_t error = EncodeTensorMap(r, &gemm.r_map)) return error;
  }
  for (int i = 0; i < (gemm.wgrad ? 2 : 0); ++i) {
    if (kL && !Config::kLKMajor) {
      l.box_lines = 16 << i;
      if (cudaError_t error = EncodeTensorMap(l, &gemm.rest_maps.l[i])) return error;
    }
    if (kR && !Config::kRKMajor) {
      r.box_lines = 16 << i;
      if (cudaError_t error = EncodeTensorMap(r, &gemm.rest_maps.r[i])) return error;
    }
  }
  return cudaSuccess;
}

// How clusters share out so many tiles.
template <typename Config>
void ShareOutSm90(GemmSm90& gemm, int64_t tiles, int clusters) {
  // Where tiles are many, everyone gets enough: then neighbours in time should be neighbours in L2.
  gemm.order.ranks = gemm.order.matrices && gemm.groups <= kMostRankedMatrices &&
                     tiles > clusters && tiles <= 2048;
  // Where a matrix has few tiles, finding the clusters would take longer than the tiles.
  gemm.order.balances = gemm.wgrad && gemm.metadata.HasEntryOfEach(gemm.groups) &&
                        !gemm.order.ranks && tiles > 2 * clusters &&
                        tiles >= 16 * static_cast<int64_t>(gemm.groups) && Config::kBalances &&
                        clusters <= kMostBalancedClusters;
}

template <typename Config>
cudaError_t LaunchConfigSm90(cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands) {
  if (cudaError_t error = EncodeOperandsSm90<Config>(gemm, operands)) return error;
  if (cudaError_t error = EncodeOutSm90<Config>(gemm)) return error;
  if (StoresMostly(gemm)) gemm.store_policy = kEvictFirst;
  return LaunchTilesSm90<Config, device::GemmSm90Kernel<Config>>(
      stream, gemm, gemm,
      [&gemm](int64_t tiles, int clusters) { ShareOutSm90<Config>(gemm, tiles, clusters); });
}

// Large tiles come in pairs that share L.
template <typename Element, bool kLKMajor>
cudaError_t LaunchGemmSm90Instance(cudaStream_t stream, GemmSm90& gemm,
                                   const OperandsSm90& operands) {
  return DispatchBool(operands.r_k_major, [&](auto r) {
    using Operands = DenseSm90<Element, kLKMajor, decltype(r)::value>;
    auto launch = [&](auto kernel) {
      return LaunchConfigSm90<ConfigSm90<decltype(kernel)>>(stream, gemm, operands);
    };
    const int tile = operands.plan.tile;
    if constexpr (kLKMajor) {
      if (IsGated(gemm.epilogue.activation)) {
        if (tile == 32) return launch(GatedRows32Sm90<Operands>{});
        // Its warps store 16 bytes at a time.
        if (tile == 256 && gemm.out_width == 8) return launch(GateApartRows256Sm90<Operands>{});
        return launch(GatedRows128Sm90<Operands>{});
      }
      if (tile == 32) return launch(Rows32Sm90<Operands>{});
      if (tile == 288) return launch(Rows288Sm90<Operands>{});
    }
    if (tile == 64) return launch(Rows64Sm90<Operands>{});
    if (tile == 128) return launch(Rows128Sm90<Operands>{});
    using Wide = WideRows256Sm90<Operands>;
    if (HasStoreWarpSm90<ConfigSm90<Wide>>(gemm)) return launch(Wide{});
    return launch(Rows256Sm90<Operands>{});
  });
}

template <bool kLKMajor, int kPlanes>
cudaError_t LaunchSplitGemmSm90Instance(cudaStream_t stream, GemmSm90& gemm,
                                        const OperandsSm90& operands) {
  return DispatchBool(operands.r_k_major, [&](auto r) {
    using Operands = PlanesSm90<cutlass::bfloat16_t, kLKMajor, decltype(r)::value, kPlanes>;
    auto launch = [&](auto kernel) {
      return LaunchConfigSm90<ConfigSm90<decltype(kernel)>>(stream, gemm, operands);
    };
    if (operands.plan.tile == 64) return launch(PlanesRowsSm90<Operands, 64>{});
    if (!operands.plan.pairs) return launch(PlanesRowsSm90<Operands, 128>{});
    return launch(PlanesRowsSm90<Operands, 128, 2>{});
  });
}

}  // namespace jgg

// The kernels of packed weights on every GPU (ffi/quantized/device/packed_sm80.cuh) on the host,
// for test_packed_kernel.py. Results are the float32 sums: what an epilogue makes of them is
// another file's.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "async_on_host.h"
//
inline bool __syncthreads_and(bool value) { return !__syncthreads_or(!value); }
#include "quantized/device/packed_few_product_sm80.cuh"
#include "quantized/device/packed_sm80.cuh"

using namespace jgg;

namespace {

// Stores sums, both of a gated product, side by side.
template <typename Config>
struct Plain {
  static void Store(const GemmSm80& gemm, const device::Tile& tile, int,
                    const float (&sums)[4][8][4], unsigned char*) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
    const bool gated = IsGated(gemm.epilogue.activation);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 8; ++j) {
        for (int v = 0; v < 4; ++v) {
          const int row = warp / Config::kWarpsN * 16 + j / 2 * Config::kRowsApart + j % 2 * 8 +
                          lane % 4 * 2 + v % 2;
          int column = (gated ? i % 2 : i) * 16 + v / 2 * 8 + lane / 4 +
                       (warp % Config::kWarpsN) * (gated ? 32 : 64);
          if (row < tile.m_lo || row >= tile.m_hi || column >= tile.n_count) continue;
          if (gated && i >= 2) column += static_cast<int>(gemm.n / 2);
          static_cast<float*>(gemm.out)[(tile.row0 + row) * gemm.n + tile.n0 + column] =
              sums[i][j][v];
        }
      }
    }
  }
};

template <Mode kMode, DType kX, int kM, int kN>
void Run(const GemmSm80& gemm, const PackedCodesSm90& packed, const void* scales,
         const GlobalScale& global, unsigned blocks) {
  using Config = device::PackedConfig<device::PackedTiles<kMode, 4, kX>, kM, kN, 3, 1, 128>;
  const auto made = device::MakePacked<Config>(gemm, packed, scales, global);
  RunBlocks({blocks, 1}, Config::kThreads,
            [&] { device::PackedSm80Kernel<Config, Plain<Config>>(made); });
}

// A block of few rows: the kernel of packed_few_rows_sm80.cuh without an epilogue.
template <typename Weights_, int kM_>
struct FewConfig {
  using Weights = Weights_;
  static constexpr int kM = kM_, kEights = kM / 8, kN = 64, kThreads = 128, kWarps = 4, kSlots = 3;
  static constexpr int kRowBytes = 128 * kM;
  static constexpr int kScaleBytes = Weights::kTileScales * Weights::Codes::kMostScaleWords;
  static constexpr int kSlotBytes = kRowBytes + kScaleBytes;
  using Work = device::Schedule<kM, kN, kThreads, true, true, 2 * kThreads, false, false, true>;
  struct SharedMemory {
    typename Work::Memory schedule;
    alignas(128) char slots[kWarps][kSlots][kSlotBytes];
    float sums[kWarps][kM][kN];
  };
};

template <typename Config>
void FewKernel(const device::PackedFewRowsSm80& of) {
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(device::SharedBytes());
  const GemmSm80& gemm = of.gemm.gemm;
  typename Config::Work work(gemm, shared.schedule);
  const device::Tile& tile = shared.schedule.tile;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  while (work.Next()) {
    float sums[4][Config::kEights][4] = {};
    int index = -1;
    Segment segment;
    if (work.NextSegment(index, segment)) {
      device::AddPackedSegment<Config>(of, tile, segment, shared, sums);
    }
    for (int i = 0; i < 4; ++i) {
      for (int e = 0; e < Config::kEights; ++e) {
        for (int v = 0; v < 4; ++v) {
          shared.sums[warp][8 * e + lane % 4 * 2 + v % 2][16 * i + v / 2 * 8 + lane / 4] =
              Config::Weights::kFactor * sums[i][e][v];
        }
      }
    }
    __syncthreads();
    const bool gated = IsGated(gemm.epilogue.activation);
    for (int i = static_cast<int>(threadIdx.x); i < Config::kM * 64; i += Config::kThreads) {
      const int row = i / 64, column = i % 64;
      if (row < tile.m_lo || row >= tile.m_hi) continue;
      const int64_t n = tile.n0 + (gated && column >= 32 ? gemm.n / 2 + column - 32 : column);
      float& out = static_cast<float*>(gemm.out)[(tile.row0 + row) * gemm.n + n];
      out = 0.0f;
      for (int w = 0; w < Config::kWarps; ++w) out += shared.sums[w][row][column];
    }
    __syncthreads();
  }
}

template <typename Weights, int kM>
void RunFew(const GemmSm80& gemm, const PackedCodesSm90& packed, const void* scales,
            unsigned blocks) {
  device::PackedFewRowsSm80 of{};
  of.gemm.gemm = gemm;
  of.packed = packed;
  of.scales = scales;
  RunBlocks({blocks, 1}, 128, [&] { FewKernel<FewConfig<Weights, kM>>(of); });
}

}  // namespace

struct Problem {
  const int32_t *data, *offset;
  const void *x, *codes, *scales;
  const float* global_scale;  // of each group or of each column, or null
  float* out;
  int64_t x_bytes, codes_bytes, scales_bytes;
  int32_t kind, count, groups, rows_x, rows, n, k, tile_scales, gated, half, global_columns;
  int32_t tile, blocks;
};

extern "C" int packed_kernel(const Problem* problem, int mode) {
  const Problem& p = *problem;
  GemmSm80 gemm{};
  gemm.product = GemmSm80::Product::kMm;
  gemm.order = GemmSm80::Order::kSegments;
  gemm.a = p.x;
  gemm.out = p.out;
  gemm.a_line = p.k;
  gemm.a_width = 8;
  gemm.rows_x = p.rows_x;
  gemm.rows_y = p.rows;
  gemm.n = p.n;
  gemm.k = p.k;
  gemm.groups = p.groups;
  gemm.metadata.kind = static_cast<MetadataKind>(p.kind);
  gemm.metadata.data = p.data;
  gemm.metadata.offset = p.offset;
  gemm.metadata.count = p.count;
  if (p.gated) gemm.epilogue.activation = Activation::kSwiglu;
  const PackedCodesSm90 packed{p.codes, p.n / 64, p.k / 64, p.tile_scales, p.half != 0};
  const GlobalScale global{p.global_scale, p.global_columns ? p.n : 1, p.global_columns ? 1 : 0};
  readable.assign({{static_cast<const char*>(p.x), p.x_bytes},
                   {static_cast<const char*>(p.codes), p.codes_bytes},
                   {static_cast<const char*>(p.scales), p.scales_bytes}});
  const auto blocks = static_cast<unsigned>(p.blocks);
  const auto run = [&](auto of) {
    constexpr Mode kMode = decltype(of)::value;
    const auto as = [&](auto x) {
      constexpr DType kX = decltype(x)::value;
      using Weights = device::PackedTiles<kMode, 4, kX>;
      if (p.tile == 8) return RunFew<Weights, 8>(gemm, packed, p.scales, blocks);
      if (p.tile == 64) return Run<kMode, kX, 64, 256>(gemm, packed, p.scales, global, blocks);
      Run<kMode, kX, 128, 256>(gemm, packed, p.scales, global, blocks);
    };
    if (p.half) return as(std::integral_constant<DType, DType::kF16>{});
    as(std::integral_constant<DType, DType::kBF16>{});
  };
  switch (static_cast<Mode>(mode)) {
    case Mode::kAffine: run(std::integral_constant<Mode, Mode::kAffine>{}); break;
    case Mode::kMxfp4: run(std::integral_constant<Mode, Mode::kMxfp4>{}); break;
    case Mode::kNvfp4: run(std::integral_constant<Mode, Mode::kNvfp4>{}); break;
    default: return 1;
  }
  return 0;
}

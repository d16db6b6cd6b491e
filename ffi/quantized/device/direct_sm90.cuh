// Products of a few rows in all with weights in layout "sm90": a decode step of a token or two. The
// kernel of tiles (gemm_sm90.cuh) takes 10 us for weights that memory delivers in 2: few of its
// blocks have a tile, and each has to begin, fill a ring and end. Here as many blocks as possible
// have something to read, and all of what a warp reads is under way at once.
//
// A block has 16 columns and up to 8 rows of one group. Its warps share out k, whose tiles they
// take in turns; their sums are added in the order of warps.
#pragma once

#include <cstdint>

#include "grouped_mm/mm.h"
#include "quantized/device/direct_rows.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

constexpr int kDirectWarps = 8;

// Of a warp: how many tiles of k it has the words of at a time, so that three blocks fit registers.
template <typename Weights, bool kGated>
constexpr int DirectTiles() {
  using Words = typename Weights::template Reader<1>::Words;
  constexpr int kWords = (kGated ? 2 : 1) * sizeof(Words) / 4;
  return kWords <= 8 ? 4 : kWords <= 16 ? 2 : 1;
}

struct DirectGemmSm90 {
  Metadata metadata;  // kSizes
  Epilogue epilogue;  // without existing_out and a second result
  const char* x;      // bfloat16
  void* out;
  DType out_dtype;
  int rows, n, groups;  // n: of w
  const void* scales;
  GlobalScale global_scale;
  PackedCodesSm90 packed;
};

// For Weights::Reader: a block's warps all have the same 16 of a tile's 64 columns.
struct DirectThread {
  __device__ static int Get() { return blockIdx.x % 4 * 32 + threadIdx.x % 32; }
};

// A warp's rows of x, of some tiles of k, in its shared memory: 8 lines of 128 bytes for each tile,
// whose pieces of 16 bytes are swizzled by the line. Lines of no row are zeros.
template <int kTiles>
class DirectX {
 public:
  __device__ DirectX(const DirectGemmSm90& gemm, const DirectRows& rows, char* shared)
      : x_(gemm.x), shared_(shared), rows_(rows), k_tiles_(gemm.packed.k_tiles) {}

  // Tiles first, first + kDirectWarps, ..., if they exist. They are there after Wait.
  __device__ void Copy(int first) const {
    const int lane = threadIdx.x % 32, piece = lane % 8;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int tile = first + i / 2 * kDirectWarps, row = i % 2 * 4 + lane / 8;
      const bool exists = tile < k_tiles_ && row < rows_.loaded;
      const int64_t line = exists ? rows_.first + row : 0;
      const char* from = x_ + (line * k_tiles_ + (exists ? tile : 0)) * 128 + piece * 16;
      CopyPiece(from, shared_ + i / 2 * 1024 + row * 128 + (piece ^ row) * 16, exists ? 16 : 0);
    }
  }

  __device__ static void Wait() {
    WaitCopied();
    __syncwarp();
  }

  // Of tile i of these, 32 k: half 0 or 1.
  __device__ void Read(int i, int half, uint32_t (&pairs)[4]) const {
    const int lane = threadIdx.x % 32, row = lane % 8, piece = half * 4 + lane / 8;
    LoadMatrices(shared_ + i * 1024 + row * 128 + (piece ^ row) * 16, pairs);
  }

 private:
  const char* x_;
  char* shared_;
  const DirectRows& rows_;
  int k_tiles_;
};

// Finish::Store stores a result: the sum of weight `weight`, and that of what a gate lets through.
template <typename Weights, bool kGated, typename Finish>
__global__ void __launch_bounds__(32 * kDirectWarps, 3)
    DirectGemmSm90Kernel(const __grid_constant__ DirectGemmSm90 gemm) {
  constexpr int kBlocks = kGated ? 2 : 1, kTiles = DirectTiles<Weights, kGated>();
  using Reader = typename Weights::template Reader<1, DirectThread>;
  __shared__ uint4 shared_x[kDirectWarps][kTiles * 64];
  __shared__ float4 partial[kBlocks][kDirectWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  DirectRows rows;
  if (gemm.metadata.count == 1 && gemm.metadata.offset == nullptr) {
    // Nothing waits for the size of the only group.
    const int first = kDirectRows * blockIdx.y, size = gemm.metadata.data[0];
    rows = {first, min(kDirectRows, gemm.rows - first), size - first, 0};
  } else {
    rows = FindDirectRows(gemm.metadata, gemm.groups, gemm.rows, blockIdx.y);
    if (rows.loaded == 0) return;
  }
  float sums[kBlocks][2][4] = {};  // two chains, since each product waits for the one before
  if (rows.weight >= 0) {
    const int tile_scales = Weights::TileScales(gemm.packed), k_tiles = gemm.packed.k_tiles;
    const Reader reader(tile_scales);
    const DirectX<kTiles> x(gemm, rows, reinterpret_cast<char*>(shared_x[warp]));
    const char *codes[kBlocks], *scales[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int column_tile = blockIdx.x / 4 + b * (gemm.n / 128);
      const int64_t tile =
          (static_cast<int64_t>(rows.weight) * gemm.packed.column_tiles + column_tile) * k_tiles;
      codes[b] = static_cast<const char*>(gemm.packed.codes) + tile * Weights::kTileCodes;
      scales[b] = static_cast<const char*>(gemm.scales) + tile * tile_scales;
    }
#pragma unroll 1
    for (int first = warp; first < k_tiles; first += kDirectWarps * kTiles) {
      typename Reader::Words words[kTiles][kBlocks];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int tile = first + i * kDirectWarps;
        if (tile >= k_tiles) break;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          words[i][b] = reader.template Load<true, ScaleRange::kAny>(codes[b], scales[b], tile);
        }
      }
      x.Copy(first);
      // The next ones are on their way to L2 meanwhile.
#pragma unroll
      for (int i = kTiles; i < 2 * kTiles; ++i) {
        const int64_t tile = first + i * kDirectWarps;
        if (tile >= k_tiles) break;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          PrefetchToL2(codes[b] + tile * Weights::kTileCodes +
                       DirectThread::Get() * (Weights::kTileCodes / 128));
        }
      }
      x.Wait();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int tile = first + i * kDirectWarps;
        if (tile >= k_tiles) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t pairs[4];
          x.Read(i, half, pairs);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            uint32_t a[8];
            reader.template Read<2, true, ScaleRange::kAny>(words[i][b], tile, 2 * half, a);
            MultiplyWarp(a, pairs[0], pairs[1], sums[b][0]);
            MultiplyWarp(a + 4, pairs[2], pairs[3], sums[b][1]);
          }
        }
      }
      __syncwarp();  // all lanes have read x
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float both[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) both[i] = sums[b][0][i] + sums[b][1][i];
    partial[b][warp][lane] = make_float4(both[0], both[1], both[2], both[3]);
  }
  __syncthreads();
  if (threadIdx.x >= 128) return;
  // Sum i % 4 of lane i / 4, as products have them.
  const int i = threadIdx.x, of_lane = i / 4;
  const int row = of_lane % 4 * 2 + i % 2, column = 16 * blockIdx.x + of_lane / 4 + i % 4 / 2 * 8;
  if (row >= rows.loaded) return;
  const int at = rows.first + row;
  if (row >= rows.inside) {
    if (gemm.metadata.clears_rest) Finish::StoreZero(gemm, at, column, kGated);
    return;
  }
  float values[2] = {0.0f, 0.0f};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int w = 0; w < kDirectWarps; ++w) {
      values[b] += reinterpret_cast<const float*>(partial[b][w])[i];
    }
    values[b] *= Weights::kFactor;
    if (gemm.global_scale.data != nullptr) {
      values[b] *= gemm.global_scale.At(rows.weight, column + b * (gemm.n / 2));
    }
  }
  Finish::Store(gemm, rows.weight, at, column, values[0], values[1], kGated);
}

}  // namespace jgg::device

// The sums of 16 columns, of a weight in layout "sm90", and of 8 rows or a few times 8, by a block:
// for kernels of a few rows in all. Its warps share out tiles of k and take them in turns. All that
// a warp reads of some of them is under way at once; there is no ring, and one barrier.
#pragma once

#include <cstdint>

#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

constexpr int kDirectWarps = 8;

// For PackedTiles::Reader: a block's warps all have the same 16 of a tile's 64 columns.
struct DirectThread {
  __device__ static int Get() { return blockIdx.x % 4 * 32 + threadIdx.x % 32; }
};

// kBlocks: of 16 columns, two where a gate and what it lets through are both needed. kEights: of
// rows.
template <typename Weights, int kBlocks, int kEights = 1>
class DirectProduct {
  using Reader = typename Weights::template Reader<1, DirectThread>;
  using Words = typename Reader::Words;
  // Tiles of which a warp has the words at a time, so that three blocks fit registers.
  static constexpr int kWords = kBlocks * sizeof(Words) / 4;
  static constexpr int kMostTiles = kWords <= 8 ? 4 : kWords <= 16 ? 2 : 1;
  static constexpr int kTiles = kMostTiles > kEights ? kMostTiles / kEights : 1;
  // Sums of 8 rows are in two chains, since each product waits for the one before.
  static constexpr int kChains = kEights == 1 ? 2 : 1;

 public:
  struct SharedMemory {
    // A warp's rows of x: lines of 128 bytes for each tile, whose pieces of 16 bytes are swizzled
    // by the line.
    uint4 x[kDirectWarps][kTiles * kEights * 64];
    float4 partial[kEights][kBlocks][kDirectWarps][32];
  };

  // By all threads, which have to meet before Sum. Of `count` tiles, tile_of(i) is that of k;
  // column(i, block) says where its column begins, line(i, row) where row `row` of x has its 64 k,
  // null for zeros. Each thread calls before_x() once, before it reads x, when it has asked for the
  // first of its weights.
  template <typename TileOf, typename ColumnOf, typename LineOf, typename BeforeX>
  __device__ static void Multiply(SharedMemory& memory, int tile_scales, int count, TileOf tile_of,
                                  ColumnOf column, LineOf line, BeforeX before_x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Reader reader(tile_scales);
    char* const x = reinterpret_cast<char*>(memory.x[warp]);
    float sums[kBlocks][kEights * kChains][4] = {};
    if (warp >= count) before_x();
#pragma unroll 1
    for (int first = warp; first < count; first += kDirectWarps * kTiles) {
      Words words[kTiles][kBlocks];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int at = first + i * kDirectWarps;
        if (at >= count) break;
        const int tile = tile_of(at);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const PackedColumn from = column(at, b);
          words[i][b] = reader.template Load<true, ScaleRange::kAny>(from.codes, from.scales, tile);
        }
      }
      // The next ones are on their way to L2 until then.
#pragma unroll
      for (int i = kTiles; i < 2 * kTiles; ++i) {
        const int at = first + i * kDirectWarps;
        if (at >= count) break;
        const int64_t offset = static_cast<int64_t>(tile_of(at)) * Weights::kTileCodes +
                               DirectThread::Get() * (Weights::kTileCodes / 128);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) PrefetchToL2(column(at, b).codes + offset);
      }
      if (first == warp) before_x();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int at = first + i * kDirectWarps;
        if (at >= count) break;
#pragma unroll
        for (int four = 0; four < 2 * kEights; ++four) {
          const int row = four * 4 + lane / 8, piece = lane % 8;
          const char* from = line(at, row);
          char* to = x + i * kEights * 1024 + row * 128 + (piece ^ row % 8) * 16;
          // Something that exists is named where nothing is read.
          CopyPiece((from == nullptr ? line(at, -1) : from) + piece * 16, to,
                    from == nullptr ? 0 : 16);
        }
      }
      WaitCopied();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int at = first + i * kDirectWarps;
        if (at >= count) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 32 k
          const int row = lane % 8, piece = half * 4 + lane / 8;
          uint32_t pairs[kEights][4];
#pragma unroll
          for (int e = 0; e < kEights; ++e) {
            LoadMatrices(x + (i * kEights + e) * 1024 + row * 128 + (piece ^ row) * 16, pairs[e]);
          }
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            uint32_t a[8];
            reader.template Read<2, true, ScaleRange::kAny>(words[i][b], 0, 2 * half, a);
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              MultiplyWarp(a, pairs[e][0], pairs[e][1], sums[b][e]);
            }
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              MultiplyWarp(a + 4, pairs[e][2], pairs[e][3], sums[b][e + kChains - 1]);
            }
          }
        }
      }
      __syncwarp();  // all lanes have read x
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        float all[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          all[i] = sums[b][e][i];
          if (kChains == 2) all[i] += sums[b][e + 1][i];
        }
        memory.partial[e][b][warp][lane] = make_float4(all[0], all[1], all[2], all[3]);
      }
    }
  }

  template <typename TileOf, typename ColumnOf, typename LineOf>
  __device__ static void Multiply(SharedMemory& memory, int tile_scales, int count, TileOf tile_of,
                                  ColumnOf column, LineOf line) {
    Multiply(memory, tile_scales, count, tile_of, column, line, [] {});
  }

  // Each of the first 128 threads has one sum of each 8 rows, which is in this row of them and this
  // column of the block.
  __device__ static int Row() { return threadIdx.x / 4 % 4 * 2 + threadIdx.x % 2; }
  __device__ static int Column() { return threadIdx.x / 16 + threadIdx.x % 4 / 2 * 8; }
  // Sums of warps are added in order.
  __device__ static float Sum(const SharedMemory& memory, int block, int eight = 0) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kDirectWarps; ++w) {
      sum += reinterpret_cast<const float*>(memory.partial[eight][block][w])[threadIdx.x];
    }
    return sum * Weights::kFactor;
  }
};

}  // namespace jgg::device

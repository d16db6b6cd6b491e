// The kernel of nvfp4_quantize in blocks of 16 along R of x (M, R, C), stored transposed: a line of
// the result is a column of x. R may be grouped: each group is padded to 64 rows.
#pragma once

#include "nvfp4/device/quantize.cuh"

namespace jgg::nvfp4::device {

struct TileRows {
  int64_t first;
  int count;  // the others are zeros
};

__device__ inline TileRows RowsOfTile(const QuantizeParams& p, int64_t tile) {
  int64_t first = kTileLines * tile, end = p.rows;
  if (p.groups != 0) {
    if (tile >= p.tiles[p.groups]) return {0, 0};
    const int group = GroupOfTile(p.tiles, p.groups, static_cast<int>(tile));
    first = p.starts[group] + kTileLines * (tile - p.tiles[group]);
    end = p.starts[group + 1];
  }
  return {first, static_cast<int>(max(int64_t{0}, min(int64_t{kTileLines}, end - first)))};
}

// Columns of a lane, neighbours.
template <DType kOf>
inline constexpr int kLaneColumns = kOf == DType::kF32 ? 1 : 2;

// 16 rows of a lane's columns, a word of each; `left` rows and `own` columns are there. Only then
// are loads without conditions, as they are nearly always; `wide`: whole words lie at their own
// place.
template <DType kOf>
__device__ void LoadColumns(const uint8_t* at, int64_t pitch, int left, int own, bool wide,
                            uint32_t (&words)[kBlock]) {
  if (left >= kBlock && own == kLaneColumns<kOf> && wide) {
    JGG_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      words[i] = __ldg(reinterpret_cast<const uint32_t*>(at));
      at += pitch;
    }
    return;
  }
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    words[i] = 0;
    if constexpr (kOf == DType::kF32) {
      if (i < left && own > 0) words[i] = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else {
      const auto* pair = reinterpret_cast<const uint16_t*>(at);
      if (i < left && own > 0) words[i] = __ldg(pair);
      if (i < left && own > 1) words[i] |= uint32_t{__ldg(pair + 1)} << 16;
    }
    at += pitch;
  }
}

template <DType kOf>
__device__ Values ColumnOf(const uint32_t (&words)[kBlock], int which) {
  Values values;
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    if constexpr (kOf == DType::kF32) {
      values.words[i] = words[i];
    } else {
      values.words[i] = AsBits(jgg::device::Half<kOf>(words[i], which));
    }
  }
  return values;
}

// Of each of a lane's columns; NaN where there is one.
template <DType kOf>
__device__ void LargestOfColumns(const uint32_t (&words)[kBlock],
                                 float (&largest)[kLaneColumns<kOf>]) {
  if constexpr (kOf == DType::kF32) {
    largest[0] = LargestMagnitude(ColumnOf<kOf>(words, 0));
  } else {
    uint32_t pair = jgg::device::Magnitudes2<kOf>(words[0]);
    JGG_UNROLL
    for (int i = 1; i < kBlock; ++i) {
      pair = jgg::device::Max2<kOf>(pair, jgg::device::Magnitudes2<kOf>(words[i]));
    }
    largest[0] = jgg::device::Half<kOf>(pair, 0);
    largest[1] = jgg::device::Half<kOf>(pair, 1);
  }
}

// That of 16 columns, to all lanes that have them.
template <DType kOf>
__device__ void ShareLargest(float (&largest)[kLaneColumns<kOf>]) {
  constexpr int kLanes = kBlock / kLaneColumns<kOf>;
  float all = largest[0];
  if constexpr (kLaneColumns<kOf> == 2) all = jgg::device::Max(all, largest[1]);
  JGG_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) {
    all = jgg::device::Max(all, __shfl_xor_sync(0xffffffffu, all, mask));
  }
  JGG_UNROLL
  for (int j = 0; j < kLaneColumns<kOf>; ++j) largest[j] = all;
}

// Two neighbouring blocks of a line, the first of them number `at` of `blocks`.
__device__ inline void StoreCodes(const uint32_t (&codes)[4], int64_t at, int64_t blocks,
                                  uint8_t* line) {
  if (blocks % 2 == 0) {
    if (at < blocks) {
      *reinterpret_cast<uint4*>(line + 8 * at) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
    return;
  }
  auto* two = reinterpret_cast<uint2*>(line) + at;
  if (at < blocks) two[0] = make_uint2(codes[0], codes[1]);
  if (at + 1 < blocks) two[1] = make_uint2(codes[2], codes[3]);
}

// The scales of four, one to a byte.
__device__ inline void StoreScales(uint32_t bytes, int64_t at, int64_t blocks, uint8_t* line) {
  if (blocks % 4 == 0) {
    *reinterpret_cast<uint32_t*>(line + at) = bytes;
    return;
  }
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (at + i < blocks) line[at + i] = bytes >> 8 * i;
  }
}

enum class Blocks { kOwn, kSquare, kHadamard };

// Of ColumnsKernel, to a multiprocessor: as many as do not spill registers.
template <DType kOf, Blocks kBlocks, bool kStochastic>
inline constexpr int kResident =
    kOf == DType::kF16 || kBlocks == Blocks::kHadamard || kStochastic ? 2 : 3;

// A warp per 64 rows x 32 or 64 columns, whose rows it reads as whole lines of 128 bytes; the warps
// of a block have neighbouring rows, so that what they write is together.
template <DType kOf, Blocks kBlocks, bool kStochastic, bool kAmax>
__global__ void __launch_bounds__(kQuantizeThreads, kResident<kOf, kBlocks, kStochastic>)
    ColumnsKernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kPer = kLaneColumns<kOf>, kWarps = kQuantizeThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t across = CeilDiv(p.columns, 32 * kPer);
  const int64_t tile = blockIdx.x / across * kWarps + warp;
  const int64_t column = (blockIdx.x % across * 32 + lane) * kPer;
  const bool some = kTileLines / kBlock * tile < p.blocks;
  const int own = static_cast<int>(max(int64_t{0}, min(int64_t{kPer}, p.columns - column)));
  const int64_t pitch = p.columns * kElementBytes<kOf>;
  const bool wide = kOf == DType::kF32 || p.columns % 2 == 0;
  if (!kAmax && !some) return;
  const TileRows rows = some ? RowsOfTile(p, tile) : TileRows{0, 0};
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    const uint8_t* x = p.x + (m * p.rows + rows.first) * pitch + column * kElementBytes<kOf>;
    const int64_t line = m * p.columns + column;  // of the result
    uint32_t amax = 0, scales[kPer] = {};
    MatrixScales matrix{};
    if constexpr (kAmax) {
      amax = __ldcg(p.amax + m);  // what others have found so far
    } else {
      matrix = p.matrix_scales[m];
    }
    JGG_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[2][kBlock], codes[kPer][4];
      const int64_t at = 4 * tile + 2 * half;
      JGG_UNROLL
      for (int b = 0; b < 2; ++b) {
        const int skipped = kBlock * (2 * half + b);
        LoadColumns<kOf>(x + skipped * pitch, pitch, rows.count - skipped, own, wide, words[b]);
      }
      JGG_UNROLL
      for (int b = 0; b < 2; ++b) {
        float largest[kPer];
        if constexpr (kBlocks != Blocks::kHadamard) LargestOfColumns<kOf>(words[b], largest);
        if constexpr (kBlocks == Blocks::kSquare) ShareLargest<kOf>(largest);
        JGG_UNROLL
        for (int j = 0; j < kPer; ++j) {
          Values values = ColumnOf<kOf>(words[b], j);
          if constexpr (kAmax) {
            static_assert(kBlocks == Blocks::kHadamard);
            RaiseToRotated(values, &amax);
          } else {
            if constexpr (kBlocks == Blocks::kHadamard) {
              Rotate(&values);
              largest[j] = LargestMagnitude(values);
            }
            const BlockScale scale = MakeBlockScale(largest[j], matrix);
            EncodeBlock<kStochastic>(p, values, scale, (line + j) * p.blocks + at + b,
                                     codes[j] + 2 * b);
            scales[j] |= scale.byte << 8 * (2 * half + b);
          }
        }
      }
      if constexpr (!kAmax) {
        JGG_UNROLL
        for (int j = 0; j < kPer; ++j) {
          if (j < own) StoreCodes(codes[j], at, p.blocks, p.weight + (line + j) * p.blocks * 8);
        }
      }
    }
    if constexpr (kAmax) {
      JoinAmax(amax, p.amax + m);
    } else {
      JGG_UNROLL
      for (int j = 0; j < kPer; ++j) {
        if (j < own) StoreScales(scales[j], 4 * tile, p.blocks, p.scales + (line + j) * p.blocks);
      }
    }
  }
}

}  // namespace jgg::nvfp4::device

// A warp's sums of 64 x 64 to the result, by way of 2 KB of shared memory of its own: no other warp
// is waited for.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/addends_sm80.cuh"
#include "grouped_mm/device/instructions_sm80.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "grouped_mm/device/turns_sm80.h"
#include "grouped_mm/gemm_sm80.h"

namespace jgg::device {

constexpr int kWarpTile = 64;       // rows and columns of a warp
constexpr int kResultBytes = 2048;  // of shared memory for each warp's results

// A warp's sums, [atom of 16 rows][atom of 8 columns][as mma.sync has them]. Or turned, where rows
// of the result are the instruction's N side: [atom of 16 columns][atom of 8 rows].
using WarpSums = float[4][8][4];

// An 8 x 8 matrix of 16-bit values of a warp, turned.
__device__ inline uint32_t TurnedMatrix(uint32_t matrix) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

// Stores the results of kN columns of a tile, from `column` on. `results` are of all warps.
template <typename Config>
class WarpResults {
  using Element = typename Config::Element;
  using Turn = TurnSm80<Config::kBKMajor>;

 public:
  __device__ static void Store(const GemmSm80& gemm, const Tile& tile, int column,
                               const WarpSums& sums, unsigned char* results) {
    const int thread = ThreadAnew(), warp = thread / 32, lane = thread % 32;
    const int row0 = warp / Config::kWarpsN * 16;
    if (row0 >= tile.m_hi) return;
    if (Config::kKeepsEmpty && gemm.epilogue.accumulate && tile.segment.length == 0) return;
    const bool gated = Config::kHasOptions && IsGated(gemm.epilogue.activation);
    const int n0 = column + (warp % Config::kWarpsN * kWarpTile >> gated);
    unsigned char* staged = results + warp * kResultBytes;
    const bool plain = !(Config::kHasOptions || Config::kAddsExisting) || !gemm.epilogue.Any();
    if (plain && gemm.out_width == 8 && gemm.out_dtype == kOutDType) {
      StorePacked(gemm, tile, sums, row0, n0, lane, staged);
    } else if (gemm.out_width > 1) {
      StoreFused<4>(gemm, tile, sums, row0, n0, lane, reinterpret_cast<float*>(staged));
    } else {
      StoreFused<1>(gemm, tile, sums, row0, n0, lane, reinterpret_cast<float*>(staged));
    }
  }

 private:
  static constexpr DType kOutDType =
      std::is_same_v<Element, cutlass::bfloat16_t> ? DType::kBF16 : DType::kF16;

  __device__ static int64_t Origin(const GemmSm80& gemm, const Tile& tile) {
    const bool matrices = gemm.product == GemmSm80::Product::kWgrad;
    return (matrices ? tile.weight * gemm.out_group : 0) + tile.row0 * gemm.out_m + tile.n0;
  }

  // The two results of 8 rows and 8 columns that this thread packs: they are of row lane / 4.
  __device__ static uint32_t PairOf(const WarpSums& sums, int eight, int j) {
    if constexpr (Config::kTurned) {
      const float* two = sums[j / 2][eight] + j % 2 * 2;
      return TurnedMatrix(Pack<Element>(two[0], two[1]));
    } else {
      const float* two = sums[eight / 2][j] + eight % 2 * 2;
      return Pack<Element>(two[0], two[1]);
    }
  }

  // 16 rows at a time: 128 bytes each, whose pieces of 16 bytes are swizzled by row.
  __device__ static void StorePacked(const GemmSm80& gemm, const Tile& tile, const WarpSums& sums,
                                     int row0, int n0, int lane, unsigned char* staged) {
    const int row = lane / 4;
    uint32_t* words = reinterpret_cast<uint32_t*>(staged);
    const int column = n0 + lane % 8 * 8;
    Element* to = static_cast<Element*>(gemm.out) + Origin(gemm, tile) +
                  (row0 + lane / 8) * gemm.out_m + column;
    const int64_t rows = 4 * gemm.out_m, more = (Config::kRowsApart - 12) * gemm.out_m;
    const int m_lo = tile.m_lo, m_hi = column < tile.n_count ? tile.m_hi : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row0 + Config::kRowsApart * i >= tile.m_hi) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = row * 32 + ((j ^ row) * 4 + lane % 4);
        words[at] = PairOf(sums, 2 * i, j);
        words[at + 8 * 32] = PairOf(sums, 2 * i + 1, j);
      }
      __syncwarp();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int from = 4 * s + lane / 8, m = row0 + Config::kRowsApart * i + from;
        const uint4 values =
            reinterpret_cast<const uint4*>(staged)[from * 8 + (lane % 8 ^ from % 8)];
        if (m >= m_lo && m < m_hi) *reinterpret_cast<uint4*>(to) = values;
        to += s < 3 ? rows : more;
      }
      __syncwarp();
    }
  }

  // 8 rows of floats at a time, with bias, activation, row scale and existing result; kWidth is 4,
  // or 1. Pieces of 8 floats are swizzled by row.
  template <int kWidth>
  __device__ static void StoreFused(const GemmSm80& gemm, const Tile& tile, const WarpSums& sums,
                                    int row0, int n0, int lane, float* staged) {
    const Epilogue& epilogue = gemm.epilogue;
    const bool gated = Config::kHasOptions && IsGated(epilogue.activation);
    const int64_t origin = Origin(gemm, tile);
    const int per_row = (kWarpTile / kWidth) >> gated, shift = Log2(kWarpTile / kWidth) - gated;
#pragma unroll 1
    for (int part = 0; part < 8; ++part) {
      const int first = row0 + part / 2 * Config::kRowsApart + part % 2 * 8;
      if (first >= tile.m_hi) break;
#pragma unroll
      for (int p = 0; p < 8; ++p) {
        if (p != part) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if constexpr (Config::kTurned) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int r = lane % 4 * 2 + e;
              staged[r * 64 + (j ^ r) * 8 + lane / 4] = sums[j / 2][p][j % 2 * 2 + e];
            }
          } else {
            *reinterpret_cast<float2*>(staged + lane / 4 * 64 + (j ^ lane / 4) * 8 + lane % 4 * 2) =
                make_float2(sums[p / 2][j][p % 2 * 2], sums[p / 2][j][p % 2 * 2 + 1]);
          }
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < 8 * per_row; i += 32) {
        const int r = i >> shift, c = (i & (per_row - 1)) * kWidth;
        const int row = first + r, column = n0 + c;
        if (row < tile.m_lo || row >= tile.m_hi || column >= tile.n_count) continue;
        float values[kWidth];
        const int piece = gated ? Turn::GatePiece(c / 8) : c / 8;
        Read<kWidth>(staged + r * 64 + (piece ^ r) * 8 + c % 8, values);
        if (Config::kHasOptions && tile.weight >= 0) {
          if (epilogue.bias != nullptr) AddBias<kWidth>(gemm, tile, column, values);
          if (gated) {
            float up[kWidth];
            Read<kWidth>(staged + r * 64 + ((piece + Turn::kPieces) ^ r) * 8 + c % 8, up);
            if (epilogue.bias != nullptr) AddBias<kWidth>(gemm, tile, gemm.n / 2 + column, up);
            Gate<false, kWidth>(epilogue.activation, values, up);
          } else {
            Activate<kWidth>(epilogue.activation, values);
          }
          if (epilogue.row_scale != nullptr) {
            const float scale =
                LoadFloat(epilogue.row_scale, tile.row0 + row, epilogue.row_scale_dtype);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) values[j] *= scale;
          }
        }
        const int64_t to = origin + row * gemm.out_m + column;
        if (Config::kAddsExisting && epilogue.accumulate) AddExisting<kWidth>(gemm, to, values);
        StoreValues<kWidth>(gemm, to, values);
      }
      __syncwarp();
    }
  }

  template <int kWidth>
  __device__ static void Read(const float* from, float (&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      values[0] = *from;
    } else {
      const float4 four = *reinterpret_cast<const float4*>(from);
      values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    }
  }

  template <int kWidth>
  __device__ static void StoreValues(const GemmSm80& gemm, int64_t at,
                                     const float (&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      StoreFloat(gemm.out, at, gemm.out_dtype, values[0]);
    } else if (gemm.out_dtype == DType::kF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(gemm.out) + at) =
          make_float4(values[0], values[1], values[2], values[3]);
    } else if (gemm.out_dtype == DType::kBF16) {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(gemm.out) + at) =
          make_uint2(Pack<cutlass::bfloat16_t>(values[0], values[1]),
                     Pack<cutlass::bfloat16_t>(values[2], values[3]));
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(gemm.out) + at) = make_uint2(
          Pack<cutlass::half_t>(values[0], values[1]), Pack<cutlass::half_t>(values[2], values[3]));
    }
  }
};

}  // namespace jgg::device

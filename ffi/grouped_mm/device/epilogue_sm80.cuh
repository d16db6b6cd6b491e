// From float32 sums in shared memory to the result: bias, activation, row scale, existing result,
// rounding, and stores along whichever axis of the result is contiguous.
#pragma once

#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/addends_sm80.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "grouped_mm/gemm_sm80.h"

namespace jgg::device {

// kRowsOnly: for a result that is contiguous along its rows.
template <int kM, int kN, int kThreads, bool kRowsOnly = false>
class ResultTile {
 public:
  // The sums in shared memory, contiguous along the same axis as the result. They are padded, so
  // that writing them from the layout of an mma meets few banks twice.
  static constexpr int kRowStride = kN + 8, kColumnStride = kM + 8;
  static constexpr int kFloats =
      kRowsOnly || kM * kRowStride > kN* kColumnStride ? kM* kRowStride : kN* kColumnStride;

  // Write the tile's sums to the result. All threads call it; `floats` is free afterwards.
  template <typename Ops>
  __device__ static void Store(const GemmSm80& gemm, const Tile& tile, const Ops& ops,
                               float* floats) {
    using namespace cute;
    const bool by_rows = kRowsOnly || gemm.out_n == 1;
    if (by_rows) {
      ops.Write(floats, Layout<Shape<Int<kM>, Int<kN>>, Stride<Int<kRowStride>, _1>>{});
    } else {
      ops.Write(floats, Layout<Shape<Int<kM>, Int<kN>>, Stride<_1, Int<kColumnStride>>>{});
    }
    if (!by_rows) {
      StoreColumns(gemm, tile, floats);
    } else if (!gemm.epilogue.Any()) {
      if (gemm.out_width == 8) {
        StoreSums<8>(gemm, tile, floats);
      } else if (gemm.out_width == 4) {
        StoreSums<4>(gemm, tile, floats);
      } else {
        StoreSums<1>(gemm, tile, floats);
      }
    } else if (gemm.out_width > 1) {
      StoreFused<4>(gemm, tile, floats);
    } else {
      StoreFused<1>(gemm, tile, floats);
    }
    __syncthreads();
  }

 private:
  __device__ static int64_t Origin(const GemmSm80& gemm, const Tile& tile) {
    const bool matrices = gemm.product == GemmSm80::Product::kWgrad;
    return (matrices ? tile.weight * gemm.out_group : 0) + tile.row0 * gemm.out_m +
           tile.n0 * gemm.out_n;
  }

  // Stores the sums as they are, kWidth at a time: 16 bytes, or one value.
  template <int kWidth>
  __device__ static void StoreSums(const GemmSm80& gemm, const Tile& tile, const float* floats) {
    constexpr int kPerRow = kN / kWidth, kRowsPerStep = kThreads / kPerRow;
    constexpr int kSteps = (kM + kRowsPerStep - 1) / kRowsPerStep;
    static_assert(kThreads % kPerRow == 0);
    const int column = threadIdx.x % kPerRow * kWidth, first = threadIdx.x / kPerRow;
    if (column >= tile.n_count) return;
    const int64_t to = Origin(gemm, tile) + first * gemm.out_m + column;
    const int m_lo = tile.m_lo, m_hi = tile.m_hi;
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) {
      const int row = first + step * kRowsPerStep;
      if (row < m_lo || row >= m_hi) continue;
      float values[kWidth];
      Read<kWidth>(floats + row * kRowStride + column, values);
      StoreValues<kWidth>(gemm, to + step * kRowsPerStep * gemm.out_m, values);
    }
  }

  // Stores them with bias, activation, row scale and existing result; kWidth is 4, or 1.
  template <int kWidth>
  __device__ static void StoreFused(const GemmSm80& gemm, const Tile& tile, const float* floats) {
    const Epilogue& epilogue = gemm.epilogue;
    const bool gated = IsGated(epilogue.activation);
    const int per_row = (kN / kWidth) >> gated, shift = Log2(kN / kWidth) - gated;
    const int64_t origin = Origin(gemm, tile);
#pragma unroll 1
    for (int i = threadIdx.x; i < kM * per_row; i += kThreads) {
      const int row = i >> shift, column = (i & (per_row - 1)) * kWidth;
      if (row < tile.m_lo || row >= tile.m_hi || column >= tile.n_count) continue;
      float values[kWidth], up[kWidth];
      Read<kWidth>(floats + row * kRowStride + column, values);
      if (tile.weight >= 0) {
        if (epilogue.bias != nullptr) AddBias<kWidth>(gemm, tile, column, values);
        if (gated) {
          Read<kWidth>(floats + row * kRowStride + kN / 2 + column, up);
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
      if (epilogue.accumulate) AddExisting<kWidth>(gemm, to, values);
      StoreValues<kWidth>(gemm, to, values);
    }
  }

  // Neighbouring threads store neighbouring rows.
  __device__ static void StoreColumns(const GemmSm80& gemm, const Tile& tile, const float* floats) {
    const int64_t origin = Origin(gemm, tile);
#pragma unroll 1
    for (int i = threadIdx.x; i < kN * kM; i += kThreads) {
      const int column = i / kM, row = i % kM;
      if (row < tile.m_lo || row >= tile.m_hi || column >= tile.n_count) continue;
      StoreFloat(gemm.out, origin + row * gemm.out_m + column * gemm.out_n, gemm.out_dtype,
                 floats[column * kColumnStride + row]);
    }
  }

  template <int kWidth>
  __device__ static void Read(const float* from, float (&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      values[0] = *from;
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + j);
        values[j] = four.x;
        values[j + 1] = four.y;
        values[j + 2] = four.z;
        values[j + 3] = four.w;
      }
    }
  }

  template <int kWidth>
  __device__ static void StoreValues(const GemmSm80& gemm, int64_t at,
                                     const float (&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      StoreFloat(gemm.out, at, gemm.out_dtype, values[0]);
    } else {
      if (kWidth == 4 && gemm.out_dtype == DType::kF32) {
        *reinterpret_cast<float4*>(static_cast<float*>(gemm.out) + at) =
            make_float4(values[0], values[1], values[2], values[3]);
        return;
      }
      uint32_t words[kWidth / 2];
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) {
        words[j] = gemm.out_dtype == DType::kBF16
                       ? Pack<cutlass::bfloat16_t>(values[2 * j], values[2 * j + 1])
                       : Pack<cutlass::half_t>(values[2 * j], values[2 * j + 1]);
      }
      uint16_t* to = static_cast<uint16_t*>(gemm.out) + at;
      if constexpr (kWidth == 8) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      }
    }
  }
};

}  // namespace jgg::device

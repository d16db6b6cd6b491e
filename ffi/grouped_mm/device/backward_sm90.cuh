// The backward pass of a gated activation, in the registers that hold a product's sums d. In the
// ring of stages, a tile's part of h follows its slices of k, 64 rows a stage. TMA copies it while
// the last slices are multiplied. A warpgroup reads its columns of gates and of values from a
// stage. It writes their cotangents in their place, and the scaled activation to a buffer of its
// own. The warp that stores writes all three to memory, and frees the stage.
#pragma once

#include <cstdint>

#include "grouped_mm/by_list_sm90.h"
#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/gemm_sm90.cuh"

namespace jgg::device {

constexpr int kBackwardRows = 64;                    // of h in a stage
constexpr int kBackwardBytes = kBackwardRows * 128;  // of 64 columns of them
template <typename Config>                           // of a tile, whatever its rows and columns
constexpr int kBackwardStages = Config::kBlocks * Config::kRows / kBackwardRows;

// One thread: gates of both warpgroups, then values.
template <typename Config>
__device__ void CopyBackward(const BackwardByListSm90& by_list,
                             typename Config::SharedMemory& memory, const Work& work, int chunk,
                             int stage) {
  uint64_t* full = &memory.full[stage];
  const ChunkPlace place = PlaceOfChunk<Config>(chunk, 0);
  const int groups = place.In(work) + PlaceOfChunk<Config>(chunk, 1).In(work);
  ArriveExpecting(full, 2 * groups * kBackwardBytes);
#pragma unroll 1
  for (int i = 0; i < 2 * groups; ++i) {
    const int half = i / groups, group = i - half * groups;
    CopyBox(&by_list.backward.h_map, full, memory.r[stage][0] + (2 * half + group) * kBackwardBytes,
            work.out_column + place.column + 64 * group, work.out_row + place.row, half);
  }
}

// Sums values over the 8 lanes that have the same lane % 4. Lane l returns the sum of value l / 4.
__device__ inline float SumOverLanes(float (&values)[8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int width = 4; width > 0; width /= 2) {
    const bool upper = (lane & 4 * width) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float given = upper ? values[i] : values[i + width];
      const float kept = upper ? values[i + width] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, given, 4 * width);
    }
  }
  return values[0];
}

// 64 rows of a warpgroup's 64 columns. A thread has 32 of their sums: see EpilogueSm90::AddBias for
// which. It reads gates and values, and writes their cotangents in their place.
template <typename T, Activation kActivation>
__device__ __forceinline__ void BackwardOfSums(const float* sums, const float (&scale)[2],
                                               char* gates, char* values, char* activated,
                                               float (&row_sums)[2]) {
  const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
  const int piece = (threadIdx.x % 128 / 32 * 2 + lane / 8 % 2) ^ (row % 8);
  const int place = row * 128 + piece * 16;
  float of_rows[2][8];
#pragma unroll
  for (int i = 0; i < kBackwardRows / 16; ++i) {
    const auto at = [&](char* box) { return box + place + i * 16 * 128; };
    uint32_t x[4], up[4], a[4];
    LoadTurnedMatrices(at(gates), x);
    LoadTurnedMatrices(at(values), up);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float its[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        its[e] = __shfl_sync(~0u, scale[i / 2], (2 * i + block) % 4 * 8 + lane % 4 * 2 + e);
        of_rows[e][2 * i + block] = 0.0f;
      }
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int word = 2 * block + column;
        float dx[2], dup[2], value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float d = sums[8 * i + 2 * word + e];
          const auto half = [&](uint32_t both) {
            return static_cast<float>(T::bitcast(static_cast<uint16_t>(both >> (16 * e))));
          };
          const Activated f = Differentiate<kActivation>(half(x[word]), half(up[word]));
          // The rounded activation is what was multiplied.
          const float rounded = static_cast<float>(T(f.value)), scaled = d * its[e];
          of_rows[e][2 * i + block] += d * rounded;
          value[e] = rounded * its[e];
          dx[e] = scaled * f.by_x;
          dup[e] = scaled * f.by_up;
        }
        x[word] = Pack<T>(dx[0], dx[1]);
        up[word] = Pack<T>(dup[0], dup[1]);
        a[word] = Pack<T>(value[0], value[1]);
      }
    }
    StoreMatrices<true>(at(gates), x[0], x[1], x[2], x[3]);
    StoreMatrices<true>(at(values), up[0], up[1], up[2], up[3]);
    StoreMatrices<true>(at(activated), a[0], a[1], a[2], a[3]);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) row_sums[e] = SumOverLanes(of_rows[e]);
}

// A warpgroup's sums of a tile.
template <typename Config>
__device__ __forceinline__ void StageBackward(
    const BackwardByListSm90& by_list, typename Config::SharedMemory& memory, const Work& work,
    int group, Place<Config::kStages>& at, Place<Config::kStoreBuffers>& store,
    const float (&sums)[Config::kBlocks][Config::kRows / 2]) {
  using T = typename Config::Element;
  const BackwardSm90& backward = by_list.backward;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < kBackwardStages<Config>; ++chunk) {
    const ChunkPlace place = PlaceOfChunk<Config>(chunk, group);
    const int first = place.row;
    if (!place.In(work)) {
      Wait(&memory.full[at.index], at.parity);
      Release<Config>(memory, at.index);
    } else {
      float scale[2], row_sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + 32 * i + lane;
        scale[i] = row < work.rows ? __ldg(backward.row_scale + work.out_row + row) : 0.0f;
      }
      Wait(&memory.full[at.index], at.parity);
      Wait(&memory.stores.empty[group][store.index], store.parity ^ 1);
      char* gates = memory.r[at.index][0] + group * kBackwardBytes;
      constexpr int kEach = kBackwardStages<Config> / Config::kBlocks;
      BackwardOfSums<T, Config::kBackward>(sums[chunk / kEach] + first / 2, scale, gates,
                                           gates + 2 * kBackwardBytes,
                                           Buffer<Config>(memory, group, store.index), row_sums);
      FenceAsyncProxy();
      __syncwarp();
      if (lane == 0) Arrive(&memory.stores.full[group][store.index]);
      store.Next();
      // The sums are of the warp's 16 columns.
      const int part = (work.out_column + place.column) / 16 + threadIdx.x % 128 / 32;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = first + lane / 4 * 8 + lane % 4 * 2 + e;
        if (row < work.rows && 16 * part < by_list.gemm.n) {
          backward.row_sums[static_cast<int64_t>(part) * by_list.gemm.rows_y + work.out_row + row] =
              row_sums[e];
        }
      }
    }
    at.Next();
  }
}

// Rows of no segment: all results are zeros.
template <typename Config>
__device__ void ZeroBackward(const BackwardByListSm90& by_list, const Work& work, int column) {
  const GemmSm90& gemm = by_list.gemm;
  const int thread = threadIdx.x % 128, piece = column + thread % 8 * 8;
  const auto zero = [](void* data, int64_t element) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + element) = make_uint4(0, 0, 0, 0);
  };
#pragma unroll 1
  for (int row = thread / 8; row < work.rows && piece < work.columns; row += 16) {
    const int64_t at = work.out_row + row, to = work.out_column + piece;
    zero(gemm.out, at * gemm.out_line + to);
    zero(by_list.backward.dh, at * 2 * gemm.n + to);
    zero(by_list.backward.dh, at * 2 * gemm.n + gemm.n + to);
  }
#pragma unroll 1
  for (int row = thread / 4; row < work.rows; row += 32) {
    const int part = (work.out_column + column) / 16 + thread % 4;
    if (column < work.columns && 16 * part < gemm.n) {
      by_list.backward.row_sums[static_cast<int64_t>(part) * gemm.rows_y + work.out_row + row] = 0;
    }
  }
}

// One of the two warpgroups that multiply.
template <typename Config>
__device__ __forceinline__ void MultiplyBackwardWarpgroup(const BackwardByListSm90& by_list,
                                                          typename Config::SharedMemory& memory,
                                                          int group) {
  Place<Config::kStages> at, cleared;
  Place<Config::kStoreBuffers> store;
  ForEachWork<Config>(memory, [&](const Work& work) __attribute__((always_inline)) {
    if (work.slices == 0) {
#pragma unroll 1
      for (int block = 0; block < Config::kBlocks; ++block) {
        ZeroBackward<Config>(by_list, work, 128 * block + 64 * group);
      }
      return;
    }
    typename Products<Config>::Sums sums;
    Products<Config>::MultiplyTile(memory, work, false, group, at, cleared, sums);
    StageBackward<Config>(by_list, memory, work, group, at, store, sums);
  });
}

// One warp stores `rows` rows of 64 columns from shared memory. Rows behind them belong to others.
__device__ inline void StoreRows(const CUtensorMap* map, const CUtensorMap* rest, void* data,
                                 int64_t element, int64_t line, const char* staged, int column,
                                 int row, int half, int rows, int columns) {
  const int lane = threadIdx.x % 32, piece = lane % 8, whole = rows / 8 * 8;
  if (lane == 0) {
    if (rows == kBackwardRows) {
      StoreBox(map, staged, column, row, half, kEvictNormal);
    } else {
#pragma unroll 1
      for (int i = 0; i < whole; i += 8) {
        StoreBox(rest, staged + i * 128, column, row + i, half, kEvictNormal);
      }
    }
  }
  if (piece * 8 >= columns) return;
  for (int i = whole + lane / 8; i < rows; i += 4) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + element + i * line + piece * 8) =
        *reinterpret_cast<const uint4*>(staged + i * 128 + (piece ^ (i % 8)) * 16);
  }
}

// The warp that stores. TMA reads what a warpgroup has written before the stage is free.
template <typename Config>
__device__ void StoreBackwardWarp(const BackwardByListSm90& by_list,
                                  typename Config::SharedMemory& memory) {
  const GemmSm90& gemm = by_list.gemm;
  const BackwardSm90& backward = by_list.backward;
  const int lane = threadIdx.x % 32;
  Place<Config::kStages> at;
  Place<Config::kStoreBuffers> places[2];
  ForEachWork<Config>(memory, [&](const Work& work) {
    if (work.slices == 0) return;
    at.Skip(work.slices);
    uint64_t* buffer_before = nullptr;
    int stage_before = 0;
    // For its warpgroup's four warps, to both blocks.
    const auto release = [&] {
      __syncwarp();
      if (buffer_before == nullptr) return;
      if (lane == 0) Arrive(buffer_before);
      if (lane < 8) ArriveAt(&memory.empty[stage_before], lane / 4);
    };
#pragma unroll 1
    for (int chunk = 0; chunk < kBackwardStages<Config>; ++chunk) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const ChunkPlace of_tile = PlaceOfChunk<Config>(chunk, group);
        if (!of_tile.In(work)) continue;
        Place<Config::kStoreBuffers>& place = places[group];
        Wait(&memory.stores.full[group][place.index], place.parity);
        const int row = work.out_row + of_tile.row, column = work.out_column + of_tile.column;
        const int rows = min(kBackwardRows, work.rows - of_tile.row);
        const int columns = work.columns - of_tile.column;
        const char* gates = memory.r[at.index][0] + group * kBackwardBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          StoreRows(&backward.dh_map, &backward.dh_rest, backward.dh,
                    static_cast<int64_t>(row) * 2 * gemm.n + half * gemm.n + column, 2 * gemm.n,
                    gates + 2 * half * kBackwardBytes, column, row, half, rows, columns);
        }
        StoreRows(&gemm.out_map, &gemm.mm_maps.out_rest, gemm.out,
                  static_cast<int64_t>(row) * gemm.out_line + column, gemm.out_line,
                  Buffer<Config>(memory, group, place.index), column, row, 0, rows, columns);
        if (lane == 0) {
          CommitStores();
          WaitStored<1>();
        }
        release();
        buffer_before = &memory.stores.empty[group][place.index];
        stage_before = at.index;
        place.Next();
      }
      at.Next();
    }
    if (lane == 0) WaitStored<0>();
    release();
  });
}

}  // namespace jgg::device

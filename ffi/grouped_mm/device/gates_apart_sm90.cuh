// Gated activations beside the products. One warpgroup has 64 gates, and the other has the 64
// values that they let through. Both hand their rounded sums to two warps, as they do to the store
// warp (store_sm90.cuh), and go on with the next tile. Those two warps read a chunk of rows from
// shared memory, in pieces of 16 bytes. They write the activation, and the sums too if a call asks
// for them.
#pragma once

#include <cstdint>

#include "grouped_mm/device/activation.cuh"
#include "grouped_mm/device/store_sm90.cuh"

namespace jgg::device {

constexpr int kGateWarps = 2;

// 8 values in 16 bytes.
template <typename T>
struct Piece {
  float values[8];

  __device__ explicit Piece(uint4 four) {
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] =
          static_cast<float>(T::bitcast(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))));
    }
  }

  __device__ uint4 Rounded() const {
    return make_uint4(Pack<T>(values[0], values[1]), Pack<T>(values[2], values[3]),
                      Pack<T>(values[4], values[5]), Pack<T>(values[6], values[7]));
  }
};

__device__ inline uint4 StagedPiece(const char* staged, int row, int piece) {
  return *reinterpret_cast<const uint4*>(staged + row * 128 + (piece ^ (row % 8)) * 16);
}

__device__ inline uint4* PieceAt(void* data, int64_t element) {
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + element);
}

// One of kGateWarps makes its share of the gated activation of rows [first, first + rows) of a
// tile, 64 columns from `begin` on.
template <typename T>
__device__ void GateChunk(const GemmSm90& gemm, const Work& work, const char* gates,
                          const char* values, int warp, int first, int rows, int begin = 0) {
  const int lane = threadIdx.x % 32, piece = lane % 8, column = begin + piece * 8;
  if (column >= work.columns) return;
  const int half = gemm.n / 2;
#pragma unroll 2
  for (int row = warp * 4 + lane / 8; row < rows; row += 4 * kGateWarps) {
    const uint4 gate = StagedPiece(gates, row, piece), value = StagedPiece(values, row, piece);
    if (void* h = gemm.epilogue.preactivation) {
      const int64_t to =
          static_cast<int64_t>(work.out_row + first + row) * gemm.n + work.out_column + column;
      *PieceAt(h, to) = gate;
      *PieceAt(h, to + half) = value;
    }
    Piece<T> x(gate);
    const Piece<T> up(value);
    Gate<true, 8>(gemm.epilogue.activation, x.values, up.values);
    *PieceAt(gemm.out, work.out + (first + row) * gemm.out_line + column) = x.Rounded();
  }
}

// One of kGateWarps, which has every so many-th row.
template <typename Config>
__device__ void GateWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory, int warp) {
  constexpr int kChunk = Config::kStoreChunk;
  static_assert(Config::kHalves == 1 && Config::kStoreBuffers == 1);
  Place<1> at;
  const auto gate = [&](const Work& work, int first, int rows, int begin) {
    Wait(&memory.stores.full[0][0], at.parity);
    Wait(&memory.stores.full[1][0], at.parity);
    GateChunk<typename Config::Element>(gemm, work, memory.staged[0], memory.staged[1], warp, first,
                                        rows, begin);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      Arrive(&memory.stores.empty[0][0]);
      Arrive(&memory.stores.empty[1][0]);
    }
    at.Next();
  };
  ForEachWork<Config>(memory, [&](const Work& work) {
    if constexpr (Config::kBlocks == 2) {
      if (work.rows == 0) return;
#pragma unroll 1
      for (int begin = 0; begin < work.columns; begin += 64) gate(work, 0, work.rows, begin);
    } else {
#pragma unroll 1
      for (int first = 0; first < work.rows; first += kChunk) {
        gate(work, first, min(kChunk, work.rows - first), 0);
      }
    }
  });
}

}  // namespace jgg::device

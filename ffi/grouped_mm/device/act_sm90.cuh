// Activations, and their derivatives, beside the products: the warpgroups that multiply hand their
// rounded sums to two warps, as they do to the one that stores (store_sm90.cuh), and go on with the
// next tile. Those warps read a chunk of rows from shared memory, in pieces of 16 bytes, and write
// results where they belong.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/device/activation_derivative.cuh"
#include "grouped_mm/device/store_sm90.cuh"

namespace jgg::device {

// What is made of the sums: nothing, a gated activation, or what an activation's backward pass
// makes of them.
enum class Acts { kNone, kGate, kBackward };

constexpr int kActWarps = 2;

template <Activation kValue>
using ActivationConstant = std::integral_constant<Activation, kValue>;

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

// The gated activation of rows [first, first + rows) of a tile, one of kActWarps' share of it.
template <typename T>
__device__ void GateChunk(const GemmSm90& gemm, const Work& work, const char* gates,
                          const char* values, int warp, int first, int rows) {
  const int lane = threadIdx.x % 32, piece = lane % 8, column = piece * 8;
  if (column >= work.columns) return;
  const int half = gemm.n / 2;
#pragma unroll 2
  for (int row = warp * 4 + lane / 8; row < rows; row += 4 * kActWarps) {
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

// The backward pass of a gated activation of rows [first, first + rows) of a tile, 64 columns from
// `column` on. One warp; all lanes.
template <typename T, Activation kActivation>
__device__ void BackwardChunk(const GemmSm90& gemm, const Work& work, const char* staged,
                              int column, int first, int rows) {
  const ActivationOfRows& of = gemm.backward;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const bool exists = column + piece * 8 < work.columns;
  const int64_t columns = gemm.n, begin = static_cast<int64_t>(work.out_row + first);
  const int64_t at = work.out_column + column + piece * 8;
  float* sums = of.row_sums + static_cast<int64_t>((work.out_column + column) / 64) * gemm.rows_y;
  const auto load = [&](int row, uint4(&h)[2]) {
    const bool there = exists && row < rows;
    const int64_t from = (begin + row) * 2 * columns + at;
    h[0] = there ? __ldcs(PieceAt(const_cast<void*>(of.h), from)) : make_uint4(0, 0, 0, 0);
    h[1] =
        there ? __ldcs(PieceAt(const_cast<void*>(of.h), from + columns)) : make_uint4(0, 0, 0, 0);
  };
  uint4 next[2];
  load(lane / 8, next);
#pragma unroll 1
  for (int step = 0; step < rows; step += 4) {
    const int row = step + lane / 8;
    Piece<T> x(next[0]), up(next[1]);
    load(row + 4, next);
    const bool there = exists && row < rows;
    const Piece<T> d(there ? StagedPiece(staged, row, piece) : make_uint4(0, 0, 0, 0));
    const float scale = row < rows ? __ldg(of.row_scale + begin + row) : 0.0f;
    Piece<T> value(make_uint4(0, 0, 0, 0));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Activated f = Differentiate<kActivation>(x.values[i], up.values[i]);
      // What was multiplied is the rounded activation.
      const float rounded = static_cast<float>(T(f.value));
      sum += d.values[i] * rounded;
      value.values[i] = rounded * scale;
      const float scaled = d.values[i] * scale;
      x.values[i] = scaled * f.by_x;
      up.values[i] = scaled * f.by_up;
    }
    if (there) {
      const int64_t to = (begin + row) * 2 * columns + at;
      *PieceAt(of.dh, to) = x.Rounded();
      *PieceAt(of.dh, to + columns) = up.Rounded();
      *PieceAt(gemm.out, (begin + row) * columns + at) = value.Rounded();
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (piece == 0 && row < rows) sums[begin + row] = sum;
  }
}

// Lines of h that a warp will need, to L2.
__device__ inline void PrefetchLines(const GemmSm90& gemm, const Work& work, int column) {
  const int64_t columns = gemm.n, at = work.out_column + column;
  const char* h = static_cast<const char*>(gemm.backward.h);
  for (int i = threadIdx.x % 32; i < 2 * work.rows; i += 32) {
    const int64_t element = (2 * static_cast<int64_t>(work.out_row + i / 2) + i % 2) * columns + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(h + 2 * element));
  }
}

// One of kActWarps. Of a gated activation each has every so many-th row; for a backward pass each
// has the columns of a warpgroup.
template <typename Config>
__device__ void ActWarp(const GemmSm90& gemm, typename Config::SharedMemory& memory, int warp) {
  using T = typename Config::Element;
  constexpr int kChunk = Config::kStoreChunk;
  static_assert(Config::kHalves == 1 && Config::kStoreBuffers == 1 && kActWarps == 2);
  Place<1> at;
  ForEachWork<Config>(memory, [&](const Work& work) {
    const int column = Config::kGates ? 0 : 64 * warp;
    if (column >= work.columns) return;
    if constexpr (!Config::kGates) PrefetchLines(gemm, work, column);
#pragma unroll 1
    for (int first = 0; first < work.rows; first += kChunk) {
      const int rows = min(kChunk, work.rows - first);
      if constexpr (Config::kGates) {
        Wait(&memory.stores.full[0][0], at.parity);
        Wait(&memory.stores.full[1][0], at.parity);
        GateChunk<T>(gemm, work, memory.staged[0], memory.staged[1], warp, first, rows);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          Arrive(&memory.stores.empty[0][0]);
          Arrive(&memory.stores.empty[1][0]);
        }
      } else {
        Wait(&memory.stores.full[warp][0], at.parity);
        const auto run = [&](auto activation) {
          constexpr Activation kActivation = decltype(activation)::value;
          BackwardChunk<T, kActivation>(gemm, work, memory.staged[warp], column, first, rows);
        };
        switch (gemm.backward.activation) {
          case Activation::kSwiglu: run(ActivationConstant<Activation::kSwiglu>{}); break;
          case Activation::kGeglu: run(ActivationConstant<Activation::kGeglu>{}); break;
          case Activation::kReglu: run(ActivationConstant<Activation::kReglu>{}); break;
          case Activation::kSwigluOai: run(ActivationConstant<Activation::kSwigluOai>{}); break;
          default: break;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) Arrive(&memory.stores.empty[warp][0]);
      }
      at.Next();
    }
  });
}

}  // namespace jgg::device

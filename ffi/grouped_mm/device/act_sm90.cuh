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
// `column` on. One warp; all lanes. A lane loads kAhead of its pieces of h ahead, the first ones
// before it waits for the sums: one warp alone would wait for memory at every step.
template <typename T, Activation kActivation, typename Wait>
__device__ void BackwardChunk(const GemmSm90& gemm, const Work& work, const char* staged,
                              int column, int first, int rows, Wait wait) {
  constexpr int kAhead = 3;
  const ActivationOfRows& of = gemm.backward;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const bool exists = column + piece * 8 < work.columns;
  const int begin = work.out_row + first + lane / 8, at = work.out_column + column + piece * 8;
  const int mine = rows - lane / 8;  // step s is this lane's row where s < mine
  // Addresses are made anew each time: registers are few.
  const auto element = [&](int step, int width) {
    return static_cast<int64_t>(begin + step) * width + at;
  };
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint4 next[kAhead][2];
  const auto load = [&](int step, uint4(&to)[2]) {
    const bool there = exists && step < mine;
    const uint4* from = PieceAt(const_cast<void*>(of.h), element(step, 2 * gemm.n));
    to[0] = there ? __ldcs(from) : zeros;
    to[1] = there ? __ldcs(from + gemm.n / 8) : zeros;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(4 * i, next[i]);
  // Each lane has a row's scale of every so many.
  const float* scales = of.row_scale + work.out_row + first;
  const auto load_scale = [&](int from) {
    const int row = from + lane % (4 * kAhead);
    return row < rows ? __ldg(scales + row) : 0.0f;
  };
  float next_scale = load_scale(0);
  wait();
#pragma unroll 1
  for (int from = 0; from < rows; from += 4 * kAhead) {
    const float scale_of_lane = next_scale;
    next_scale = load_scale(from + 4 * kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = from + 4 * i;
      const bool real = step < mine, there = exists && real;
      Piece<T> x(next[i][0]), up(next[i][1]);
      load(step + 4 * kAhead, next[i]);
      const Piece<T> d(there ? StagedPiece(staged, step + lane / 8, piece) : zeros);
      const float scale = __shfl_sync(~0u, scale_of_lane, 4 * i + lane / 8);
      Piece<T> value(zeros);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Activated f = Differentiate<kActivation>(x.values[j], up.values[j]);
        // What was multiplied is the rounded activation.
        const float rounded = static_cast<float>(T(f.value));
        sum += d.values[j] * rounded;
        value.values[j] = rounded * scale;
        const float scaled = d.values[j] * scale;
        x.values[j] = scaled * f.by_x;
        up.values[j] = scaled * f.by_up;
      }
      if (there) {
        uint4* dh = PieceAt(of.dh, element(step, 2 * gemm.n));
        __stcs(dh, x.Rounded());
        __stcs(dh + gemm.n / 8, up.Rounded());
        __stcs(PieceAt(gemm.out, element(step, gemm.n)), value.Rounded());
      }
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (piece == 0 && real) {
        of.row_sums[static_cast<int64_t>((work.out_column + column) / 64) * gemm.rows_y + begin +
                    step] = sum;
      }
    }
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
        const auto wait = [&] { Wait(&memory.stores.full[warp][0], at.parity); };
        const auto run = [&](auto activation) {
          constexpr Activation kActivation = decltype(activation)::value;
          BackwardChunk<T, kActivation>(gemm, work, memory.staged[warp], column, first, rows, wait);
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

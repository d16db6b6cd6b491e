// dispatch, combine and the backward pass of combine, by token: a warp reads a token's line once,
// and `place` says where the token's k rows are. The lanes of a warp hold the places of up to 32
// pairs of their token, and exchange them.
//
// Tokens share out the rows that no token writes, most of them behind the last expert's: token t
// also looks after rows [t * k, t * k + k). So results are those that `order` defines, also if
// `place` is not the inverse of `order`.
#pragma once

#include <cstdint>

#include "moe/rows.h"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- pieces of 16 bytes ----

// The kernel reads these bytes once, so L1 does not take them.
__device__ inline uint4 LoadOnce(const uint4* from) {
#ifdef __CUDA_ARCH__
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
#else
  return __ldg(from);
#endif
}

// The elements of a piece, one after another.
template <DType kOf>
struct Values {
  static constexpr int kCount = 16 / Size(kOf);

  __device__ static void Of(const uint4& piece, float (&values)[kCount]) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    JGG_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kOf == DType::kF32) {
        values[i] = AsFloat(words[i]);
      } else {
        values[i] = Half<kOf>(words[i / 2], i % 2);
      }
    }
  }

  __device__ static uint4 Piece(const float* values) {
    if constexpr (kOf == DType::kF32) {
      return make_uint4(AsBits(values[0]), AsBits(values[1]), AsBits(values[2]), AsBits(values[3]));
    } else {
      return make_uint4(Round2<kOf>(values[0], values[1]), Round2<kOf>(values[2], values[3]),
                        Round2<kOf>(values[4], values[5]), Round2<kOf>(values[6], values[7]));
    }
  }

  // Loads as many elements of another type as a piece of this one has, at the piece's index.
  template <DType kFrom>
  __device__ static void Load(const void* from, int64_t piece, float (&values)[kCount]) {
    static_assert(kFrom == kOf || kFrom == DType::kF32);
    if constexpr (kFrom == kOf) {
      Of(LoadOnce(static_cast<const uint4*>(from) + piece), values);
    } else {
      JGG_UNROLL
      for (int half = 0; half < 2; ++half) {
        float four[4];
        Values<DType::kF32>::Of(LoadOnce(static_cast<const uint4*>(from) + 2 * piece + half), four);
        JGG_UNROLL
        for (int i = 0; i < 4; ++i) values[4 * half + i] = four[i];
      }
    }
  }

  template <DType kTo>
  __device__ static void Store(void* to, int64_t piece, const float* values) {
    static_assert(kTo == kOf || kTo == DType::kF32);
    if constexpr (kTo == kOf) {
      static_cast<uint4*>(to)[piece] = Piece(values);
    } else {
      JGG_UNROLL
      for (int half = 0; half < 2; ++half) {
        static_cast<uint4*>(to)[2 * piece + half] = Values<DType::kF32>::Piece(values + 4 * half);
      }
    }
  }
};

// ---- pairs ----

// Which token a thread works for, and where the thread's pieces are.
struct Position {
  int token, first, end, lanes;  // its pieces: first, first + lanes, ... below end

  __device__ Position(const PairRows& pairs, const RowsGrid& grid) {
    const int group = blockIdx.x / grid.slices, slice = blockIdx.x - group * grid.slices;
    const int warps = grid.lanes / 32, member = threadIdx.x / 32 / warps;
    token = group * grid.tokens + member;
    first = slice * grid.columns + threadIdx.x - member * grid.lanes;
    end = min((slice + 1) * grid.columns, pairs.pieces);
    lanes = grid.lanes;
  }
};

// This lane's pair, among a token's pairs from `first` on.
struct PairOfLane {
  int pair = 0, place = -1, owner = -1;
  bool there = false;

  // The kernel reads `owner` early and uses it late.
  template <bool kWithOwner>
  __device__ static PairOfLane Read(const PairRows& pairs, int token, int first) {
    PairOfLane own;
    const int j = first + threadIdx.x % 32;
    own.there = j < pairs.k;
    own.pair = token * pairs.k + j;
    if (own.there) own.place = min(pairs.place[own.pair], pairs.rows - 1);
    if (kWithOwner && own.place >= 0) own.owner = pairs.order[own.place];
    return own;
  }

  // The row that this pair writes, or -1.
  __device__ int Written() const { return owner == pair ? place : -1; }
};

// Calls fill(row, pair) for each row that these lanes look after and no token writes; the pair is
// negative if the row has none. All lanes of a warp call fill alike.
template <typename Fill>
__device__ void FillOthers(const PairRows& pairs, const PairOfLane& own, Fill fill) {
  const int all = pairs.tokens * pairs.k;
  int pair = -1;
  bool mine = false;
  if (own.there && own.pair < pairs.rows) {
    const int given = pairs.order[own.pair];
    pair = min(given, all - 1);
    // Indices beyond the end count as the last, as in Read.
    const int place = given < 0 ? -1 : min(pairs.place[pair], pairs.rows - 1);
    mine = given < 0 || given >= all || place != own.pair;
  }
  for (unsigned left = __ballot_sync(kAllLanes, mine); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    fill(__shfl_sync(kAllLanes, own.pair, lane), __shfl_sync(kAllLanes, pair, lane));
  }
}

// ---- kernels ----

struct DispatchParams {
  PairRows pairs;
  RowsGrid grid;
  const uint4* x;
  const float* weight;
  uint4* out;
  bool clears_rest;
};

// Without weights, the kernel copies pieces as they are.
template <DType kOf, bool kWeighted>
__device__ uint4 Times(const uint4& piece, float weight) {
  if constexpr (kWeighted) {
    float values[Values<kOf>::kCount];
    Values<kOf>::Of(piece, values);
    JGG_UNROLL
    for (float& value : values) value = Multiply(value, weight);
    return Values<kOf>::Piece(values);
  } else {
    return piece;
  }
}

// A thread has up to kEach pieces of its token.
template <DType kOf, bool kWeighted, int kEach>
__global__ void __launch_bounds__(kRowsThreads) DispatchKernel(const DispatchParams p) {
  const PairRows& pairs = p.pairs;
  const Position at(pairs, p.grid);
  if (at.token >= pairs.tokens) return;
  const auto each_piece = [&](auto function) {
    JGG_UNROLL
    for (int c = 0; c < kEach; ++c) {
      const int piece = at.first + c * at.lanes;
      if (piece < at.end) function(c, piece);
    }
  };
  const auto line = [&](int64_t row) { return row * pairs.pieces; };
  uint4 values[kEach];
  each_piece([&](int c, int piece) { values[c] = LoadOnce(p.x + line(at.token) + piece); });
  for (int first = 0; first < pairs.k; first += 32) {
    const PairOfLane own = PairOfLane::Read<true>(pairs, at.token, first);
    const float weight = kWeighted && own.there ? p.weight[own.pair] : 0.0f;
    const int written = own.Written();
    const int count = min(32, pairs.k - first);
    for (int j = 0; j < count; ++j) {
      const int row = __shfl_sync(kAllLanes, written, j);
      const float factor = kWeighted ? __shfl_sync(kAllLanes, weight, j) : 0.0f;
      if (row < 0) continue;
      each_piece([&](int c, int piece) {
        p.out[line(row) + piece] = Times<kOf, kWeighted>(values[c], factor);
      });
    }
    FillOthers(pairs, own, [&](int row, int pair) {
      if (pair < 0 && !p.clears_rest) return;
      const float factor = kWeighted && pair >= 0 ? p.weight[pair] : 0.0f;
      each_piece([&](int, int piece) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (pair >= 0) {
          value = Times<kOf, kWeighted>(LoadOnce(p.x + line(pair / pairs.k) + piece), factor);
        }
        p.out[line(row) + piece] = value;
      });
    });
  }
}

struct CombineParams {
  PairRows pairs;
  RowsGrid grid;
  const uint4* rows;
  const float* weight;
  void* out;
};

// kAtOnce rows are on their way at a time, to kEach pieces of a thread.
template <DType kOf, DType kOut, int kAtOnce, int kEach>
__global__ void __launch_bounds__(kRowsThreads) CombineKernel(const CombineParams p) {
  constexpr int kCount = Values<kOf>::kCount;
  const PairRows& pairs = p.pairs;
  const Position at(pairs, p.grid);
  if (at.token >= pairs.tokens) return;
  float sums[kEach][kCount] = {};
  for (int first = 0; first < pairs.k; first += 32) {
    const PairOfLane own = PairOfLane::Read<false>(pairs, at.token, first);
    const float weight = own.there && p.weight ? p.weight[own.pair] : 1.0f;
    const int count = min(32, pairs.k - first);
    for (int j = 0; j < count; j += kAtOnce) {
      int row[kAtOnce];
      uint4 values[kAtOnce][kEach];
      JGG_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        row[i] = __shfl_sync(kAllLanes, own.place, j + i);
        if (row[i] < 0) continue;
        const uint4* const from = p.rows + int64_t{row[i]} * pairs.pieces;
        JGG_UNROLL
        for (int c = 0; c < kEach; ++c) {
          const int piece = at.first + c * at.lanes;
          if (piece < at.end) values[i][c] = LoadOnce(from + piece);
        }
      }
      JGG_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const float factor = __shfl_sync(kAllLanes, weight, j + i);
        if (row[i] < 0) continue;
        JGG_UNROLL
        for (int c = 0; c < kEach; ++c) {
          float of_row[kCount];
          Values<kOf>::Of(values[i][c], of_row);
          JGG_UNROLL
          for (int n = 0; n < kCount; ++n) sums[c][n] = MultiplyAdd(of_row[n], factor, sums[c][n]);
        }
      }
    }
  }
  JGG_UNROLL
  for (int c = 0; c < kEach; ++c) {
    const int piece = at.first + c * at.lanes;
    const int64_t index = int64_t{at.token} * pairs.pieces + piece;
    if (piece < at.end) Values<kOf>::template Store<kOut>(p.out, index, sums[c]);
  }
}

struct CombineBackwardParams {
  PairRows pairs;
  RowsGrid grid;
  const void* ct;
  const uint4* rows;
  const float* weight;
  void* drows;
  float* dweight;
};

// A block for each token. kAtOnce rows are on their way at a time.
template <DType kOf, DType kCt, int kAtOnce>
__global__ void __launch_bounds__(kRowsThreads)
    CombineBackwardKernel(const CombineBackwardParams p) {
  constexpr int kCount = Values<kOf>::kCount;
  __shared__ float shared[kRowsThreads / 32][kAtOnce];
  const PairRows& pairs = p.pairs;
  const Position at(pairs, p.grid);
  const auto line = [&](int64_t row) { return row * pairs.pieces; };
  for (int first = 0; first < pairs.k; first += 32) {
    const PairOfLane own = PairOfLane::Read<true>(pairs, at.token, first);
    const float weight = own.there ? p.weight[own.pair] : 0.0f;
    const int count = min(32, pairs.k - first);
    for (int j = 0; j < count; j += kAtOnce) {
      int row[kAtOnce];
      float factor[kAtOnce], products[kAtOnce];
      JGG_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        row[i] = __shfl_sync(kAllLanes, own.place, j + i);
        factor[i] = __shfl_sync(kAllLanes, weight, j + i);
        products[i] = 0.0f;
      }
      // All lanes run this alike, because they exchange values.
      for (int base = 0; base < at.end; base += at.lanes) {
        const int piece = base + at.first;
        const bool inside = piece < at.end;
        uint4 values[kAtOnce];
        float ct[kCount] = {};
        JGG_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (row[i] >= 0 && inside) values[i] = LoadOnce(p.rows + line(row[i]) + piece);
        }
        if (inside) Values<kOf>::template Load<kCt>(p.ct, line(at.token) + piece, ct);
        const int written = own.Written();
        JGG_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          const int to = __shfl_sync(kAllLanes, written, j + i);
          if (row[i] < 0 || !inside) continue;
          float of_row[kCount];
          Values<kOf>::Of(values[i], of_row);
          JGG_UNROLL
          for (int n = 0; n < kCount; ++n) {
            products[i] = MultiplyAdd(ct[n], of_row[n], products[i]);
            of_row[n] = Multiply(ct[n], factor[i]);
          }
          if (to >= 0) Values<kOf>::template Store<kOf>(p.drows, line(to) + piece, of_row);
        }
      }
      // Sums over lanes, then over warps, always in this order.
      JGG_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        JGG_UNROLL
        for (int mask = 16; mask > 0; mask /= 2) {
          products[i] += __shfl_xor_sync(kAllLanes, products[i], mask);
        }
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][i] = products[i];
      }
      __syncthreads();
      const int i = threadIdx.x;
      if (i < kAtOnce && j + i < count) {
        float sum = 0.0f;
        for (int w = 0; w < at.lanes / 32; ++w) sum += shared[w][i];
        p.dweight[int64_t{at.token} * pairs.k + first + j + i] = sum;
      }
      __syncthreads();
    }
    FillOthers(pairs, own, [&](int other, int pair) {
      const float factor = pair >= 0 ? p.weight[pair] : 0.0f;
      for (int piece = at.first; piece < at.end; piece += at.lanes) {
        float values[kCount] = {};
        if (pair >= 0) {
          Values<kOf>::template Load<kCt>(p.ct, line(pair / pairs.k) + piece, values);
          JGG_UNROLL
          for (float& value : values) value = Multiply(value, factor);
        }
        Values<kOf>::template Store<kOf>(p.drows, line(other) + piece, values);
      }
    });
  }
}

}  // namespace jgg::device

// The experts of a few tokens, with weights of 16 bits: ../few_dense.h. What bounds them is memory,
// so weights go from there to registers, 16 bytes of a thread at a time, and each warp has two
// steps of them under way.
//
// Columns are the M side of `mma.sync`, and pairs of token and expert its N side. A step of a warp
// is 64 columns and 32 k: lane 4 * g + q has columns 8 * g to 8 * g + 7, and of each the k from
// 8 * q to 8 * q + 7. Which column a row of the instruction is, and which k it multiplies, does not
// matter, as long as both operands and the result agree.
//
// up: a block has 64 columns (32 of the gate and 32 of what it multiplies), a pair, and up to seven
// later pairs of the same expert. Its warps share out k. The block of a pair that an earlier block
// has ends at once.
//
// down: a block has a token and 64, 32 or 16 columns. Its warps share out the token's pairs, and k.
// With fewer columns a step has as many more k: kParts parts of them, of which each is a column of
// the instruction's other operand. The block adds pairs with their weights in the order of the
// token's choices. Blocks begin as soon as those of `up` leave them room (Hopper), and ask for
// their first weights before they wait for what `up` writes.
#pragma once

#include <cstdint>

#include "moe/device/few_pairs.cuh"
#include "moe/few_dense.h"
#include "moe/rules.h"
#include "quantized/device/instructions.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

constexpr int kDenseWarps = 8, kDenseThreads = 32 * kDenseWarps;
constexpr int kDenseColumns = 64, kDenseK = 32;      // of a warp's step
constexpr int kDensePairs = rules::kMostFewChoices;  // of a token
constexpr int kDenseAhead = 2;                       // steps of which a warp has the weights

// Older GPUs have no such instructions, and the host knows (few_dense_sm80.cuh).
__device__ inline void AllowDown() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  AllowNextKernel();
#endif
}
__device__ inline void WaitForUp() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  WaitForPreviousKernel();
#endif
}

// 16 bytes that are read once. Neighbours of them are other blocks': L2 fetches the whole line.
__device__ inline void LoadLine(const char* from, uint32_t (&to)[4]) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
#else
  const uint4 line = __ldg(reinterpret_cast<const uint4*>(from));
  std::memcpy(to, &line, 16);
#endif
}

// A lane's eight k of a row in shared memory.
__device__ inline void LoadRow(const char* from, bool there, uint32_t (&to)[4]) {
  const uint4 line = there ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  to[0] = line.x, to[1] = line.y, to[2] = line.z, to[3] = line.w;
}

// A lane's weights: 8 columns and 8 k of each step. Lines are of columns, or (kTransposed) of k.
template <DType kX, bool kTransposed>
struct DenseWeights {
  using Words = uint32_t[8][4];

  const char* first;
  int64_t line;  // bytes
  int k;

  // The expert's matrix, (k, n), from this column on. Columns behind the last are those before it.
  __device__ DenseWeights(const void* w, int expert, int k, int n, int column) : k(k) {
    const int own = min(column, n - 8);
    first = static_cast<const char*>(w) +
            (static_cast<int64_t>(expert) * k * n + own * (kTransposed ? int64_t{k} : 1)) * 2;
    line = int64_t{kTransposed ? k : n} * 2;
  }

  // Zeros behind the last k: NaN there must meet no other number.
  __device__ void Load(int from_k, Words& words) const {
    const bool there = from_k < k;
    const char* const from = first + (kTransposed ? from_k * int64_t{2} : from_k * line);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (there) {
        LoadLine(from + i * line, words[i]);
      } else {
        words[i][0] = words[i][1] = words[i][2] = words[i][3] = 0;
      }
    }
  }

  // Adds the products with eight k of a row. sums[p][2 * h + c]: column 2 * p + h of the lane's
  // eight, row c of its two.
  __device__ static void Multiply(const Words& words, const uint32_t (&row)[4],
                                  float (&sums)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kTransposed) {
            a[i] = words[2 * p + i % 2][2 * half + i / 2];
          } else {
            const int at = 4 * half + i / 2 * 2;
            a[i] = Permute(words[at][p], words[at + 1][p], i % 2 == 0 ? 0x5410 : 0x7632);
          }
        }
        MultiplyWarp<kX>(a, row[2 * half], row[2 * half + 1], sums[p]);
      }
    }
  }
};

template <DType kX>
__device__ float Rounded(float value) {
  return Half<kX>(Round2<kX>(value, value), 0);
}

// Bytes of a row of x in shared memory: those of neighbouring rows differ in their banks.
JGG_HOST_DEVICE int FewDenseRowBytes(int d) { return (d * 2 + 127) / 128 * 128 + 64; }

// Bytes of dynamic shared memory: rows of x, then sums.
JGG_HOST_DEVICE int FewDenseUpBytes(const FewTokens& experts) {
  const int x = FewRowsOfX(experts) * FewDenseRowBytes(experts.d);
  const int sums = kDenseWarps * kDenseColumns * 8 * 4;
  return x < sums ? sums : x;
}

// Finish: loads, stores and activations. The host has other code for these.
template <DType kX, bool kTransposed, bool kGated, typename Finish>
__global__ void __launch_bounds__(kDenseThreads, 2)
    FewDenseUpSm80Kernel(const __grid_constant__ FewDense dense) {
  constexpr int kBlocks = kGated ? 2 : 1, kColumns = kDenseColumns / kBlocks;
  using Weights = DenseWeights<kX, kTransposed>;
  __shared__ int pair_of[8];
  AllowDown();
  const FewTokens& experts = dense.experts;
  const FewPairs pairs(experts, blockIdx.y, pair_of);
  if (pairs.count == 0) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4;
  const int d = experts.d, f = experts.f, steps = (d + kDenseK - 1) / kDenseK;
  const int first_column = static_cast<int>(blockIdx.x) * kColumns, k_of_lane = lane % 4 * 8;
  // Columns behind the last of the gate are others of `up`, and their sums are not used.
  const Weights w(dense.w, pairs.expert, d, kBlocks * f,
                  first_column + 8 * g % kColumns + 8 * g / kColumns * f);
  typename Weights::Words words[kDenseAhead];
  const auto load = [&](int i, int step) {
    if (step < steps) w.Load(step * kDenseK + k_of_lane, words[i]);
  };
#pragma unroll
  for (int i = 0; i < kDenseAhead; ++i) load(i, warp + i * kDenseWarps);
  __syncthreads();
  char* const x = DynamicMemory();
  const bool by_token = experts.tokens <= 8;
  const int row_bytes = FewDenseRowBytes(d);
  for (int row = 0; row < pairs.count; ++row) {
    const int token = pair_of[row] / experts.k, place = by_token ? token : row;
    if (by_token && row > 0 && pair_of[row - 1] / experts.k == token) continue;  // it is there
    const char* const line = experts.x + static_cast<int64_t>(token) * d * 2;
    for (int i = thread; i < d / 8; i += kDenseThreads) {
      CopyPiece(line + i * 16, x + place * row_bytes + i * 16, 16);
    }
  }
  // Of this thread's results: their column.
  const int column = thread % kColumns, place_of_column = first_column + column;
  float biases[kBlocks] = {};
  if (experts.w.bias != nullptr && place_of_column < f) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = static_cast<int64_t>(pairs.expert) * kBlocks * f + b * f + place_of_column;
      biases[b] = Finish::Load(experts.w.bias, at, experts.w.bias_dtype);
    }
  }
  WaitCopied();
  __syncthreads();
  const int own_row = min(g, pairs.count - 1);
  const char* const row = x + (by_token ? pair_of[own_row] / experts.k : own_row) * row_bytes;
  float sums[4][4] = {};
#pragma unroll 1
  for (int first = warp; first < steps; first += kDenseWarps * kDenseAhead) {
#pragma unroll
    for (int i = 0; i < kDenseAhead; ++i) {
      const int step = first + i * kDenseWarps;
      if (step >= steps) break;
      const int from_k = step * kDenseK + k_of_lane;
      uint32_t of_row[4];
      LoadRow(row + from_k * 2, from_k < d, of_row);
      Weights::Multiply(words[i], of_row, sums);
      load(i, step + kDenseWarps * kDenseAhead);
    }
  }
  __syncthreads();  // x has been read
  float4* const partial = reinterpret_cast<float4*>(x);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    partial[(warp * 4 + p) * 32 + lane] =
        make_float4(sums[p][0], sums[p][1], sums[p][2], sums[p][3]);
  }
  __syncthreads();
  if (place_of_column >= f) return;
  const float* const all = reinterpret_cast<const float*>(x);
  for (int r = thread / kColumns; r < pairs.count; r += kDenseThreads / kColumns) {
    float values[2] = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int of = b * kColumns + column;  // of the block's 64
      const int at = (of % 8 / 2 * 32 + of / 8 * 4 + r / 2) * 4 + of % 2 * 2 + r % 2;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kDenseWarps; ++i) sum += all[i * 512 + at];
      values[b] = Rounded<kX>(sum + biases[b]);
    }
    const float a = Finish::template Activate<kGated>(experts.activation, values[0], values[1]);
    Finish::Store(experts.a, static_cast<int64_t>(pair_of[r]) * f + place_of_column, kX, a);
  }
}

// Bytes of dynamic shared memory of `down`: rows of a.
inline int FewDenseDownBytes(const FewTokens& experts) { return experts.k * experts.f * 2; }

template <DType kX, bool kTransposed, int kParts, typename Finish>
__global__ void __launch_bounds__(kDenseThreads, 2)
    FewDenseDownSm80Kernel(const __grid_constant__ FewDense dense) {
  constexpr int kColumns = kDenseColumns / kParts, kStepK = kDenseK * kParts;
  // Rounds of the block's threads for all pairs and columns.
  constexpr int kRounds = (kDensePairs * kColumns + kDenseThreads - 1) / kDenseThreads;
  using Weights = DenseWeights<kX, kTransposed>;
  __shared__ int choice_of[kDensePairs], expert_of[kDensePairs];
  __shared__ float partial[kDenseWarps][kDenseColumns];
  const FewTokens& experts = dense.experts;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4;
  const int d = experts.d, f = experts.f, steps = (f + kStepK - 1) / kStepK;
  // Those of the token's pairs that exist, in order.
  const int token = blockIdx.x, first_pair = token * experts.k;
  const int own = lane < experts.k ? LocalExpert(experts, first_pair + lane) : -1;
  const uint32_t exist = __ballot_sync(~0u, own >= 0);
  const int count = __popc(exist);
  if (warp == 0 && own >= 0) {
    const int place = __popc(exist & ((1u << lane) - 1));
    choice_of[place] = lane;
    expert_of[place] = own;
  }
  __syncthreads();
  // A warp has one of the pairs, and with fewer than eight a share of its k.
  const int splits = kDenseWarps / max(count, 1), number = warp / splits, split = warp % splits;
  const bool there = number < count;
  const int first_column = static_cast<int>(blockIdx.y) * kColumns, k_of_lane = lane % 4 * 8;
  const Weights w(dense.w, there ? expert_of[number] : 0, f, d, first_column + 8 * g % kColumns);
  typename Weights::Words words[kDenseAhead];
  const auto load = [&](int i, int step) {
    if (step < steps) {
      w.Load((step * kParts + 8 * g / kColumns) * kDenseK + k_of_lane, words[i]);
    }
  };
  if (there) {
#pragma unroll
    for (int i = 0; i < kDenseAhead; ++i) load(i, split + i * splits);
  }
  // Of the sums that this thread finishes.
  const int column = thread % kColumns, of_pair = thread / kColumns;
  const int64_t place_of_column = first_column + column;
  float biases[kRounds] = {}, factors[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int pair = of_pair + i * (kDenseThreads / kColumns);
    if (pair >= count || place_of_column >= d) continue;
    factors[i] = experts.expert_weight[first_pair + choice_of[pair]];
    if (experts.w.bias == nullptr) continue;
    biases[i] = Finish::Load(experts.w.bias, int64_t{expert_of[pair]} * d + place_of_column,
                             experts.w.bias_dtype);
  }
  WaitForUp();
  char* const rows = DynamicMemory();
  for (int pair = 0; pair < count; ++pair) {
    const char* const line = experts.a + static_cast<int64_t>(first_pair + choice_of[pair]) * f * 2;
    for (int i = thread; i < f / 8; i += kDenseThreads) {
      CopyPiece(line + i * 16, rows + pair * f * 2 + i * 16, 16);
    }
  }
  WaitCopied();
  __syncthreads();
  if (there) {
    const char* const row = rows + number * f * 2;
    float sums[4][4] = {};
#pragma unroll 1
    for (int first = split; first < steps; first += splits * kDenseAhead) {
#pragma unroll
      for (int i = 0; i < kDenseAhead; ++i) {
        const int step = first + i * splits;
        if (step >= steps) break;
        const int from_k = (step * kParts + g % kParts) * kDenseK + k_of_lane;
        uint32_t of_row[4];
        LoadRow(row + from_k * 2, from_k < f, of_row);
        Weights::Multiply(words[i], of_row, sums);
        load(i, step + splits * kDenseAhead);
      }
    }
    // Column n of the instruction's result is of part n % kParts, as of_row was.
    const int part = 8 * g / kColumns;
    if (lane % 4 == part / 2) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          partial[warp][8 * g + 2 * p + h] = part % 2 == 0 ? sums[p][2 * h] : sums[p][2 * h + 1];
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int pair = of_pair + i * (kDenseThreads / kColumns);
    if (pair >= count) continue;
    float sum = 0.0f;
    for (int s = 0; s < splits; ++s) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        sum += partial[pair * splits + s][part * kColumns + column];
      }
    }
    // No other thread reads this place.
    partial[pair * splits][column] = (sum + biases[i]) * factors[i];
  }
  __syncthreads();
  if (thread >= kColumns || place_of_column >= d) return;
  float sum = 0.0f;
  for (int pair = 0; pair < count; ++pair) sum += partial[pair * splits][thread];
  Finish::Store(experts.out, static_cast<int64_t>(token) * d + place_of_column, experts.out_dtype,
                sum);
}

}  // namespace jgg::device

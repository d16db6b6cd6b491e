// Tiles of at most 16 rows, with K-major weights as they are stored. Threads decode codes in
// registers, which are the tensor cores' A operand, so only codes of a weight go through shared
// memory.
//
// mma.sync has columns of the result on its M side. Thread 4 * g + j of a warp has columns g and
// g + 8 of the warp's 16, and of every step of 256 k the 64 from 64 * j on (of 8 bits: of 128 k the
// 32 from 32 * j on): which k an instruction multiplies does not matter, as long as both operands
// agree, so a thread takes its codes as they come, 32 at a time in the pairs of streams.cuh.
#pragma once

#include <cstdint>

#include "quantized/device/few_rows_codes_sm80.cuh"
#include "quantized/device/few_rows_weights.cuh"
#include "quantized/device/gemm_sm80.cuh"

namespace jgg::device {

// The sums of a tile: each warp has 16 columns and kBlocks times 8 rows.
template <int kBlocks_>
class FewRowsOps {
 public:
  static constexpr int kThreads = 128, kBlocks = kBlocks_;
  static constexpr int kSums = kThreads / 2 * 8 * kBlocks;

  __device__ void Clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[b][i] = 0.0f;
    }
  }

  // Add the products of 16 k. A is in registers; B is the two words of a row.
  __device__ void Add(int block, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float (&c)[4] = sums_[block];
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0,
                                              b1, c[0], c[1], c[2], c[3]);
  }

  // Add sums of 8 rows, times a factor.
  __device__ void AddSums(int block, const float4& sums, float factor) {
    sums_[block][0] += factor * sums.x;
    sums_[block][1] += factor * sums.y;
    sums_[block][2] += factor * sums.z;
    sums_[block][3] += factor * sums.w;
  }

  __device__ void Scale(float factor) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[b][i] *= factor;
    }
  }

  // With one block of rows a thread has two sums, so that products wait less for each other. Adds
  // the two up.
  __device__ void AddUp() {
    static_assert(kBlocks == 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums_[0][i] += sums_[1][i];
      sums_[1][i] = 0.0f;
    }
  }

  // As TensorOps::ForEachSum.
  template <typename Function>
  __device__ void ForEachSum(Function function) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) function(Column() + i / 2 * 8, sums_[b][i]);
    }
  }

  template <typename Layout>
  __device__ void Write(float* tile, Layout layout) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tile[layout(8 * b + threadIdx.x % 4 * 2 + i % 2, Column() + i / 2 * 8)] = sums_[b][i];
      }
    }
    __syncthreads();
  }

 private:
  __device__ static int Column() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

  float sums_[kBlocks][4];
};

template <typename Weights_>
struct FewRowsConfig {
  using Weights = Weights_;
  using Element = cutlass::bfloat16_t;
  using Ops = FewRowsOps<2>;
  static constexpr int kM = 16, kN = 64, kThreads = Ops::kThreads, kBlocksPerSm = 4;
  static constexpr bool kSumsApart = true;
  // k of a step, and of a chunk of x.
  static constexpr int kStep = 128 * Weights::kBlocks, kChunk = 256;
  // Bytes of codes in a step, of all threads.
  static constexpr int kStepBytes = 8 * Weights::kBits * Weights::kBlocks * kThreads;
  static constexpr int kStages = 24 * 1024 / kStepBytes;
  using Work = Schedule<kM, kN, kThreads, true, true>;
  using Result = ResultTile<kM, kN, kThreads, true>;
  // Words of a row of x in a chunk.
  static constexpr int kRowWords = kChunk / 2 + 16;

  // Where thread j of a column finds the four words that it multiplies in turn i of a chunk.
  // Neither reads nor writes of 8 lanes meet a bank twice.
  __device__ static constexpr int RowWord(int i, int j) {
    return (i ^ i / 2 % 2) * 16 + (j ^ i / 4 * 2) * 4;
  }

  struct SharedMemory {
    typename Work::Memory schedule;
    union {
      alignas(128) uint32_t x[2][kM][kRowWords];
      alignas(128) float result[Result::kFloats];
    };
    alignas(128) unsigned char ring[kStages][kStepBytes];
    float kept[Ops::kSums];  // SumsApart
  };
};

// Rows of x, a chunk at a time: of every 32 values, numbers p and 16 + p make a word.
template <typename Config>
class RowReader {
  static constexpr int kItems = Config::kM * Config::kChunk / 16 / Config::kThreads;

 public:
  __device__ RowReader(const QuantizedGemmSm80& gemm, const Tile& tile, const Segment& segment) {
    const int64_t row = segment.x_start + (tile.row0 - segment.y_start);
    const auto* x = static_cast<const uint16_t*>(gemm.gemm.a) + row * gemm.gemm.a_line;
    const int k = 32 * Part() + 8 * Eight();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool exists = Row(i) >= tile.m_lo && Row(i) < tile.m_hi;
      x_[i] = Kept(x + (exists ? Row(i) * gemm.gemm.a_line + k : 0));
      left_[i] = exists ? static_cast<int>(gemm.gemm.k) - k : 0;
    }
  }

  // With one block, threads neither load nor store the second half of the rows.
  __device__ void Load(int k0, bool two_blocks) {
    static_assert(kItems == 2 && kRows == 8);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i == 1 && !two_blocks) break;
      low_[i] = high_[i] = make_uint4(0, 0, 0, 0);
      if (k0 >= left_[i]) continue;
      low_[i] = __ldg(reinterpret_cast<const uint4*>(x_[i] + k0));
      high_[i] = __ldg(reinterpret_cast<const uint4*>(x_[i] + k0 + 16));
    }
  }

  __device__ void Store(uint32_t (&x)[Config::kM][Config::kRowWords], bool two_blocks) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i == 1 && !two_blocks) break;
      const uint32_t low[4] = {low_[i].x, low_[i].y, low_[i].z, low_[i].w};
      const uint32_t high[4] = {high_[i].x, high_[i].y, high_[i].z, high_[i].w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 four = make_uint4(Permute(low[2 * h], high[2 * h], 0x5410),
                                      Permute(low[2 * h], high[2 * h], 0x7632),
                                      Permute(low[2 * h + 1], high[2 * h + 1], 0x5410),
                                      Permute(low[2 * h + 1], high[2 * h + 1], 0x7632));
        constexpr int kBlocks = Config::Weights::kBlocks;
        const int turn = Part() / (4 * kBlocks) * 4 + Part() % kBlocks * 4 + 2 * Eight() + h;
        uint32_t* to = &x[Row(i)][Config::RowWord(turn, Part() / kBlocks % 4)];
        *reinterpret_cast<uint4*>(to) = four;
      }
    }
  }

 private:
  static constexpr int kParts = Config::kChunk / 32, kRows = Config::kThreads / (2 * kParts);

  // A thread has the same 8 k, and the 8 that are 16 further on, of every so many-th row.
  __device__ static int Part() { return threadIdx.x / 2 % kParts; }  // of 32 k
  __device__ static int Eight() { return threadIdx.x % 2; }
  __device__ static int Row(int i) { return threadIdx.x / (2 * kParts) + kRows * i; }

  const uint16_t* x_[kItems];  // this thread's first k of its rows
  int left_[kItems];           // and how many there are from there on
  uint4 low_[kItems], high_[kItems];
};

// A pair of codes, by a fused multiply-add where that does.
template <bool kFits, typename Weights>
__device__ uint32_t PairOf(const uint32_t (&streams)[Weights::kBits], int p, const LineScales& line,
                           const FloatScales& floats) {
  if constexpr (Weights::kHasBiases && !kFits) {
    return Weights::FloatPair(streams, p, floats);
  } else {
    return Weights::template Pair<kFits>(streams, p, line);
  }
}

// Add the products of one segment to a tile.
template <typename Config>
__device__ void AddFewRows(const QuantizedGemmSm80& gemm, const Tile& tile, const Segment& segment,
                           typename Config::SharedMemory& shared, typename Config::Ops& ops) {
  using Weights = typename Config::Weights;
  constexpr int kStages = Config::kStages, kBits = Weights::kBits, kBlocks = Weights::kBlocks;
  // Takes the codes of both blocks at a time, if there are registers for them.
  constexpr bool kLate = kBits == 6;
  const int k = static_cast<int>(gemm.gemm.k), steps = (k + Config::kStep - 1) / Config::kStep;
  CodeReader<Config> codes(gemm, tile, segment.weight);
  RowReader<Config> rows(gemm, tile, segment);
  const bool two_blocks = tile.m_hi > 8;
  if (Weights::kUnit != 1) ops.Scale(1 / Weights::kUnit);
  int write = 0;
  const auto start = [&](int step) {
    if (step < steps) codes.Start(shared.ring[write], step);
    cute::cp_async_fence();  // an empty group too, so that there is one per step
    write = write + 1 == kStages ? 0 : write + 1;
  };
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) start(step);
  rows.Load(0, two_blocks);
  uint2 next[2] = {codes.NextScales(gemm, 0, 0), codes.NextScales(gemm, 1, 0)};
  int read = 0, chunk = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step % (Config::kChunk / Config::kStep) == 0) {
      chunk ^= 1;
      rows.Store(shared.x[chunk], two_blocks);
      __syncthreads();
      rows.Load((step + Config::kChunk / Config::kStep) * Config::kStep, two_blocks);
    }
    cute::cp_async_wait<kStages - 2>();
    __syncwarp();
    const unsigned char* ring = shared.ring[read];
    uint32_t streams[2][kBlocks][kBits];
    LineScales lines[2][kBlocks];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[kBlocks][kBits];
      if (!kLate) codes.template Read<kBlocks>(ring, r, 0, words);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        lines[r][b] = codes.Line(gemm, next[r], r, b, step);
        if (kLate) continue;
        Weights::Check(words[b], lines[r][b]);
        ToStreams<kBits>(words[b], streams[r][b]);
      }
    }
    start(step + kStages - 1);
    next[0] = codes.NextScales(gemm, 0, step + 1);
    next[1] = codes.NextScales(gemm, 1, step + 1);
    read = read + 1 == kStages ? 0 : read + 1;
    const uint32_t* x = shared.x[chunk][threadIdx.x % 32 / 4];
    const int first_turn = step % (Config::kChunk / Config::kStep) * 4;
    const auto multiply = [&](auto fits, auto two) {
      constexpr bool kFits = decltype(fits)::value, kTwo = decltype(two)::value;
      FloatScales floats[2];
      const auto pair = [&](int r, int b, int p) {
        return PairOf<kFits, Weights>(streams[r][b], p, lines[r][b], floats[r]);
      };
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const int b = i / 4;
        if (kLate && i % 4 == 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t words[1][kBits];
            codes.template Read<1>(ring, r, b, words);
            ToStreams<kBits>(words[0], streams[r][b]);
          }
        }
        if constexpr (Weights::kHasBiases && !kFits) {
          if (i % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) floats[r] = codes.Floats(gemm, r, b, step);
          }
        }
        const uint32_t* from = x + Config::RowWord(first_turn + i, threadIdx.x % 4);
        const uint4 first = *reinterpret_cast<const uint4*>(from);
        uint4 second = first;
        if (kTwo) second = *reinterpret_cast<const uint4*>(from + 8 * Config::kRowWords);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int p = i % 4 * 4 + 2 * m;
          const uint32_t a[4] = {pair(0, b, p), pair(1, b, p), pair(0, b, p + 1),
                                 pair(1, b, p + 1)};
          ops.Add(kTwo ? 0 : m, a, m == 0 ? first.x : first.z, m == 0 ? first.y : first.w);
          if (kTwo) ops.Add(1, a, m == 0 ? second.x : second.z, m == 0 ? second.y : second.w);
        }
      }
    };
    const auto multiply_all = [&](auto fits) {
      if (two_blocks) {
        multiply(fits, std::true_type{});
      } else {
        multiply(fits, std::false_type{});
      }
    };
    bool all_fit = codes.Fits(gemm, lines[0][0]) && codes.Fits(gemm, lines[1][0]);
    if (kBlocks > 1 && !codes.OneGroup()) {
      all_fit &= codes.Fits(gemm, lines[0][kBlocks - 1]) && codes.Fits(gemm, lines[1][kBlocks - 1]);
    }
    if (AnyLane(!all_fit)) {
      multiply_all(std::false_type{});
    } else {
      multiply_all(std::true_type{});
    }
  }
  if (!two_blocks) ops.AddUp();
  if (Weights::kUnit != 1) ops.Scale(Weights::kUnit);
  cute::cp_async_wait<0>();
  __syncthreads();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    FewRowsSm80Kernel(const __grid_constant__ QuantizedGemmSm80 gemm) {
  __builtin_assume(threadIdx.x < Config::kThreads);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(memory);
  ForEachTile<Config>(
      gemm, shared,
      [&](const Tile& tile, const Segment& segment, typename Config::Ops& ops) {
        AddFewRows<Config>(gemm, tile, segment, shared, ops);
      },
      [&] { return shared.kept; });
}

}  // namespace jgg::device

// Tiles of at most 16 rows of K-major weights as they are stored: decoded in registers, which are
// the tensor cores' A operand, so that nothing of a weight but its codes goes through shared
// memory.
//
// mma.sync has columns of the result on its M side. Thread 4 * g + j of a warp has columns g and
// g + 8 of the warp's 16, and of every 128 k the 32 from 32 * j on: which k an instruction
// multiplies does not matter, as long as both operands agree, so a thread takes its codes as they
// come, in the pairs of streams.cuh.
#pragma once

#include <cstdint>

#include "quantized/device/gemm_sm80.cuh"
#include "quantized/device/streams.cuh"

namespace jgg::device {

// What 32 codes of a line need beside themselves, in bfloat16, in both halves (nvfp4: of codes 0-15
// and 16-31).
struct LineScales {
  uint32_t scale, bias;
};

template <Mode kMode_, int kBits_>
struct FewRowsWeights {
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
  static constexpr bool kAffine = kMode == Mode::kAffine;
  // Bytes of a copy, and copies of 32 codes.
  static constexpr int kPiece = kBits % 4 == 0 ? 16 : kBits % 2 == 0 ? 8 : 4;
  static constexpr int kPieces = 4 * kBits / kPiece;

  // From the bits of scale and bias as they are stored.
  __device__ static LineScales Scales(uint32_t scale, uint32_t bias) {
    if constexpr (kAffine) {
      return {scale * 0x10001, bias * 0x10001};
    } else if constexpr (kMode == Mode::kNvfp4) {
      const uint32_t magnitudes = Permute(scale, 0, 0x4140) & 0x007f007f;
      uint32_t scales = MultiplyAdd2<DType::kBF16>(magnitudes << 4, 0x7b807b80, 0x80008000);
      if ((magnitudes & 0xffff) == 0x7f) scales = (scales & 0xffff0000) | 0x7fc0;
      if (magnitudes >> 16 == 0x7f) scales = (scales & 0xffff) | 0x7fc00000;
      return {scales, 0};
    } else {
      const uint32_t bits = scale == 0 ? 0x40 : scale == 255 ? 0x7fc0 : scale << 7;
      return {bits * 0x10001, 0};
    }
  }

  // Whether values are those of `dequantize` by a fused multiply-add: see FitsPairs. NumbersOf are
  // whole numbers of 8 bits at most, which bfloat16 holds, so 8 bits may, too.
  __device__ static bool Fits(const LineScales& line) {
    if constexpr (!kAffine) return true;
    constexpr int kMostBelow = 14 - kBits, kMostAbove = 14;
    const float scale = AsFloat(line.scale << 16), bias = AsFloat(line.bias << 16);
    const uint32_t above = AsBits(fabsf(bias)) - AsBits(fabsf(scale)) + (kMostBelow << 23);
    return fabsf(scale) < 0x1p105f &&
           (above <= static_cast<uint32_t>(kMostBelow + kMostAbove) << 23 || bias == 0.0f);
  }

  // A NaN among e4m3 codes makes its column of the product one, so its scale may be.
  __device__ static void Check(const uint32_t (&words)[kBits], LineScales& line) {
    if constexpr (kMode == Mode::kMxfp8) {
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < kBits; ++i) nan |= (words[i] & 0x7f7f7f7f) + 0x01010101;
      if (nan & 0x80808080) line.scale = 0x7fc07fc0;
    }
  }

  template <bool kFits>
  __device__ static uint32_t Pair(const uint32_t (&streams)[kBits], int p, const LineScales& line) {
    if constexpr (kAffine) {
      const uint32_t numbers = NumbersOf<kBits>(streams, p);
      if constexpr (kFits) return MultiplyAdd2<DType::kBF16>(numbers, line.scale, line.bias);
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[i] = Add(Multiply(Half<DType::kBF16>(numbers, i), AsFloat(line.scale << 16)),
                        AsFloat(line.bias << 16));
      }
      return Round2<DType::kBF16>(values[0], values[1]);
    } else {
      constexpr uint32_t kMinusZero = 0x80008000;
      uint32_t small, power = 0x7e807e80;
      if constexpr (kMode == Mode::kMxfp8) {
        small = E4M3Of(streams, p);
        power = 0x7b807b80;
      } else {
        small = E2M1Of(streams, p);
      }
      small = MultiplyAdd2<DType::kBF16>(small, power, kMinusZero);
      return MultiplyAdd2<DType::kBF16>(small, line.scale, kMinusZero);
    }
  }
};

// The sums of a tile: of each warp 16 columns, kBlocks times 8 rows.
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

  // Of 16 k: A in registers, B a row's two words.
  __device__ void Add(int block, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float (&c)[4] = sums_[block];
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0,
                                              b1, c[0], c[1], c[2], c[3]);
  }

  // Of one block of rows there are two sums, so that products wait less for each other.
  __device__ void AddUp() {
    static_assert(kBlocks == 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums_[0][i] += sums_[1][i];
      sums_[1][i] = 0.0f;
    }
  }

  // As of TensorOps.
  template <typename Function>
  __device__ void ForEach(Function function) {
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
  // A step is 128 k; rows of x come in chunks of two.
  static constexpr int kStep = 128, kChunk = 256;
  static constexpr int kStepBytes = 8 * Weights::kBits * kThreads;  // of codes, of all threads
  static constexpr int kStages = Weights::kBits > 4 ? 4 : 6;
  using Work = Schedule<kM, kN, kThreads, true, true>;
  using Result = ResultTile<kM, kN, kThreads, true>;
  // Words of a row of x in a chunk: reads of 8 lanes meet no bank twice.
  static constexpr int kRowWords = kChunk / 2 + 16;

  struct SharedMemory {
    typename Work::Memory schedule;
    union {
      alignas(128) uint32_t x[kM][kRowWords];
      alignas(128) float result[Result::kFloats];
    };
    alignas(128) unsigned char ring[kStages][kStepBytes];
    float kept[Ops::kSums];  // SumsApart
  };
};

// A pointer that the compiler had better keep than compute again in every step.
template <typename T>
__device__ T* Kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Copies this thread's codes into its places of the ring, and reads them and their scales.
template <typename Config>
class CodeReader {
  using Weights = typename Config::Weights;
  static constexpr int kBits = Weights::kBits, kPiece = Weights::kPiece;
  static constexpr int kPieces = Weights::kPieces;

 public:
  // Columns of a tile from tile.n0 on, tile.n_count of them in either half.
  __device__ CodeReader(const QuantizedGemmSm80& gemm, const Tile& tile, int64_t weight) {
    const int half = IsGated(gemm.gemm.epilogue.activation) ? Config::kN / 2 : Config::kN;
    const int64_t line_bytes = gemm.w.elements / 8 * kBits;
    const int j = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const int in_half = column % half;
      const bool exists = in_half < tile.n_count;
      const int64_t line = weight * gemm.w.lines +
                           (exists ? tile.n0 + in_half + (column < half ? 0 : gemm.gemm.n / 2) : 0);
      const int64_t scales = line * gemm.slice.scale_line + Group(gemm, 32 * j);
      const auto at = [](const void* data, int64_t bytes) {
        return Kept(static_cast<const char*>(data) + bytes);
      };
      codes_[r] = at(gemm.w.packed, line * line_bytes + 4 * kBits * j);
      scales_[r] = at(gemm.w.scales, scales);
      if (Weights::kAffine) biases_[r] = at(gemm.w.biases, scales);
      left_[r] = exists ? static_cast<int>(gemm.w.elements) - 32 * j : 0;
    }
    scale_step_ = Group(gemm, Config::kStep);
    asm volatile("" : "+r"(scale_step_));
  }

  // Start copying this thread's codes of step `step`.
  __device__ void Start(unsigned char* place, int step) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool take = Config::kStep * step < left_[r];  // otherwise nothing is read
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        unsigned char* to = place + ((r * kPieces + i) * Config::kThreads + threadIdx.x) * kPiece;
        const char* piece = codes_[r] + 16 * kBits * step + i * kPiece;
        if constexpr (kPiece == 16) {
          cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
              *reinterpret_cast<const cute::uint128_t*>(piece),
              *reinterpret_cast<cute::uint128_t*>(to), take);
        } else {
          using Word = cute::conditional_t<kPiece == 8, uint64_t, uint32_t>;
          cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Word>::copy(*reinterpret_cast<const Word*>(piece),
                                                            *reinterpret_cast<Word*>(to), take);
        }
      }
    }
  }

  __device__ void Read(const unsigned char* place, int r, uint32_t (&words)[kBits]) const {
    using Wide =
        cute::conditional_t<kPiece == 16, uint4, cute::conditional_t<kPiece == 8, uint2, uint32_t>>;
    Wide pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces[i] =
          reinterpret_cast<const Wide*>(place)[(r * kPieces + i) * Config::kThreads + threadIdx.x];
    }
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = reinterpret_cast<const uint32_t*>(pieces)[i];
  }

  // The bits of the scale and bias of step `step`, zeros past the end. Steps come in order.
  __device__ uint2 NextScales(int r, int step) {
    uint32_t scale = 0, bias = 0;
    if (Config::kStep * step < left_[r]) {
      if constexpr (Weights::kAffine) {
        scale = __ldg(reinterpret_cast<const uint16_t*>(scales_[r]));
        bias = __ldg(reinterpret_cast<const uint16_t*>(biases_[r]));
      } else if constexpr (Weights::kMode == Mode::kNvfp4) {
        scale = __ldg(reinterpret_cast<const uint16_t*>(scales_[r]));
      } else {
        scale = __ldg(reinterpret_cast<const uint8_t*>(scales_[r]));
      }
    }
    scales_[r] += scale_step_;
    if (Weights::kAffine) biases_[r] += scale_step_;
    return make_uint2(scale, bias);
  }

 private:
  // Bytes of the scales of so many k, a multiple of a group or a part of one.
  __device__ static int Group(const QuantizedGemmSm80& gemm, int k) {
    return (k >> gemm.slice.group_bits) * (Weights::kAffine ? 2 : 1);
  }

  const char* codes_[2];                // of each column, this thread's first
  const char *scales_[2], *biases_[2];  // those of the next step
  int left_[2];                         // codes from there to the line's end
  int scale_step_;                      // bytes of scales from a step to the next
};

// Rows of x, a chunk at a time: of every 32 values numbers p and 16 + p are a word.
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

  __device__ void Load(int k0) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      low_[i] = high_[i] = make_uint4(0, 0, 0, 0);
      if (k0 >= left_[i]) continue;
      low_[i] = __ldg(reinterpret_cast<const uint4*>(x_[i] + k0));
      high_[i] = __ldg(reinterpret_cast<const uint4*>(x_[i] + k0 + 16));
    }
  }

  __device__ void Store(uint32_t (&x)[Config::kM][Config::kRowWords]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t low[4] = {low_[i].x, low_[i].y, low_[i].z, low_[i].w};
      const uint32_t high[4] = {high_[i].x, high_[i].y, high_[i].z, high_[i].w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 four = make_uint4(Permute(low[2 * h], high[2 * h], 0x5410),
                                      Permute(low[2 * h], high[2 * h], 0x7632),
                                      Permute(low[2 * h + 1], high[2 * h + 1], 0x5410),
                                      Permute(low[2 * h + 1], high[2 * h + 1], 0x7632));
        uint32_t* to = &x[Row(i)][Part() / 4 * 64 + (2 * Eight() + h) * 16 + Part() % 4 * 4];
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

// Add the products of one segment to a tile.
template <typename Config>
__device__ void AddFewRows(const QuantizedGemmSm80& gemm, const Tile& tile, const Segment& segment,
                           typename Config::SharedMemory& shared, typename Config::Ops& ops) {
  using Weights = typename Config::Weights;
  constexpr int kStages = Config::kStages, kBits = Weights::kBits;
  const int k = static_cast<int>(gemm.gemm.k), steps = (k + Config::kStep - 1) / Config::kStep;
  CodeReader<Config> codes(gemm, tile, segment.weight);
  RowReader<Config> rows(gemm, tile, segment);
  const bool two_blocks = tile.m_hi > 8;
  int write = 0;
  const auto start = [&](int step) {
    if (step < steps) codes.Start(shared.ring[write], step);
    cute::cp_async_fence();  // an empty group too, so that there is one per step
    write = write + 1 == kStages ? 0 : write + 1;
  };
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) start(step);
  rows.Load(0);
  uint2 next[2] = {codes.NextScales(0, 0), codes.NextScales(1, 0)};
  int read = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step % (Config::kChunk / Config::kStep) == 0) {
      __syncthreads();  // nobody reads the chunk before
      rows.Store(shared.x);
      __syncthreads();
      rows.Load((step + Config::kChunk / Config::kStep) * Config::kStep);
    }
    cute::cp_async_wait<kStages - 2>();  // what this thread reads it has copied itself
    uint32_t streams[2][kBits];
    LineScales lines[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[kBits];
      codes.Read(shared.ring[read], r, words);
      lines[r] = Weights::Scales(next[r].x, next[r].y);
      Weights::Check(words, lines[r]);
      ToStreams<kBits>(words, streams[r]);
    }
    start(step + kStages - 1);
    next[0] = codes.NextScales(0, step + 1);
    next[1] = codes.NextScales(1, step + 1);
    read = read + 1 == kStages ? 0 : read + 1;
    const uint32_t* x =
        &shared.x[threadIdx.x % 32 / 4]
                 [step % (Config::kChunk / Config::kStep) * 64 + threadIdx.x % 4 * 4];
    const auto multiply = [&](auto fits, auto two) {
      constexpr bool kFits = decltype(fits)::value, kTwo = decltype(two)::value;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 first = *reinterpret_cast<const uint4*>(x + 16 * i);
        uint4 second = first;
        if (kTwo) second = *reinterpret_cast<const uint4*>(x + 16 * i + 8 * Config::kRowWords);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int p = 4 * i + 2 * m;
          const uint32_t a[4] = {Weights::template Pair<kFits>(streams[0], p, lines[0]),
                                 Weights::template Pair<kFits>(streams[1], p, lines[1]),
                                 Weights::template Pair<kFits>(streams[0], p + 1, lines[0]),
                                 Weights::template Pair<kFits>(streams[1], p + 1, lines[1])};
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
    if (AnyLane(!Weights::Fits(lines[0]) || !Weights::Fits(lines[1]))) {
      multiply_all(std::false_type{});
    } else {
      multiply_all(std::true_type{});
    }
  }
  if (!two_blocks) ops.AddUp();
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

// Weights in layout "linear", as checkpoints have them: lines of codes, contiguous along k. A stage
// has the codes of 64 columns, by TMA. Threads load the scales that they need by themselves, since
// nothing aligns these, a stage before they use them.
//
// Which k an instruction multiplies does not matter, as long as both operands agree. Of 128 k
// thread j of four takes the 32 from 32 * j on as they come, in whole words, and their few scales;
// so x comes with its columns in that order (quantized/gemm_sm90.h), not the codes.
//
// Codes of 4 and 8 bits are read by slices, half of a thread's words each, from lines that TMA
// swizzles. Of others a thread reads its 32 at once: lines of 32, 48, 80 and 96 bytes, as they are,
// meet no bank twice.
#pragma once

#include <cstdint>

#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/few_rows_sm90.cuh"
#include "quantized/device/formats.cuh"
#include "quantized/device/line_tile.cuh"
#include "quantized/device/registers_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

template <Mode kMode, int kBits, DType kX_ = DType::kBF16>
struct LinearWeights {
  using Codes = LineCodes<kMode, kBits>;
  using Tile = LineTile<kBits>;
  static constexpr DType kX = kX_;  // of x, and of floating scales
  static constexpr bool kHalf = kX == DType::kF16;
  static constexpr bool kScaled = false, kHasXSums = false,
                        kFloats = false;  // scaled_lines_sm90.cuh
  static constexpr bool kScalesSums = Codes::kScalesSums, kSixteens = false;
  static constexpr bool kHasSmall = kHalf ? Codes::kHasSmallHalves : Codes::kHasSmall;
  static constexpr float kFactor = kHalf ? Codes::kHalfUnit : Codes::kUnit;
  static constexpr float kSmallFactor = Codes::kSmallFactor;
  static constexpr bool kBySlices = Tile::kBySlices;
  static constexpr int kMostRows = 192;  // that registers allow
  static constexpr bool kTakesAdapters = false;
  static constexpr int kBlocksPerSm = FormatTraits<kMode, kBits>::kLinearBlocksPerSm;
  static constexpr int kBlocksOf64 = 1;  // of up to 64 rows
  static constexpr bool kAlwaysWarps = rules::AlwaysWarps(false, kBits, false);
  static constexpr int kLoadsLateFrom = 1;                   // blocks per SM: registers are few
  static constexpr int kFewRowsSlices = kBits <= 4 ? 4 : 2;  // of a stage where warps multiply
  static constexpr int kCodeBytes = Tile::kBytes;
  static constexpr int kScaleBytes = 0;  // they do not come with a stage
  // KiB of shared memory for tiles of at most 64 rows, and, where three stages fit, for those that
  // warps multiply. The L1 cache has the rest: scales that threads load must not drive each other
  // out of it. Beside codes of 8 bits scales are few.
  static constexpr int kSmallTilesKib = 196, kFewRowsKib = kBits < 8 ? 164 : 196;

  // One thread, for one warpgroup's columns.
  template <typename Config>
  __device__ static void CopyColumns(const QuantizedGemmSm90& quantized,
                                     typename Config::SharedMemory& memory, int group) {
    const GemmSm90& gemm = quantized.gemm;
    const int columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) {
      const int first = work.out_column + 64 * group;
      const bool exists = first < columns;
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += 2) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        ArriveExpecting(full, exists ? Config::kBlocks * kCodeBytes : 0);
#pragma unroll
        for (int b = 0; b < Config::kBlocks; ++b) {
          if (!exists) break;
          CopyBox<false>(&quantized.codes_map, full, memory.codes[at.index][b][group],
                         slice * kSliceSm90 * kBits / 16, first + b * columns, work.weight);
        }
        at.Next();
      }
    });
  }

  // Few rows: one thread copies all of a stage, as of PackedWeights.
  template <typename Config>
  __device__ static void CopyStages(const QuantizedGemmSm90& quantized,
                                    typename Config::SharedMemory& memory) {
    const GemmSm90& gemm = quantized.gemm;
    const int columns = IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) {
      const int groups = work.out_column + 64 < columns ? 2 : 1;
      const CUtensorMap* l_map = Config::BoxMap(gemm, work.rows);
      const int slices = Config::StageSlices(work.rows);
      const int bytes = slices * Config::SliceBytes(work.rows) +
                        slices / 2 * groups * Config::kBlocks * kCodeBytes;
      const int sum_bytes = work.rows * static_cast<int>(sizeof(float4));  // of 128 k
      int k_tile = work.l_k / kSliceSm90;
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += slices) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        if constexpr (Config::Weights::kFloats) {
          ArriveExpecting(full, bytes - slices * Config::SliceBytes(work.rows));
        } else if constexpr (Config::Weights::kHasXSums) {
          const int count = (min(slices, work.slices - slice) + 1) / 2;
          ArriveExpecting(full, bytes + count * sum_bytes);
          for (int i = 0; i < count; ++i) {
            CopyBytes(quantized.x_sums + (k_tile / 2 + i) * int64_t{gemm.rows_x} + work.l_row, full,
                      memory.x_sums[at.index][i], sum_bytes);
          }
        } else {
          ArriveExpecting(full, bytes);
        }
        if constexpr (!Config::Weights::kFloats) {
          CopyBox<false>(l_map, full, memory.l[at.index], 0, work.l_row, k_tile);
        }
#pragma unroll
        for (int i = 0; i < 2 * Config::kBlocks; ++i) {
          const int group = i % 2, b = i / 2;
          if (group >= groups) continue;
          char* to = memory.codes[at.index][b][group];
#pragma unroll 1
          for (int s = 0; s < slices; s += 2) {
            CopyBox<false>(&quantized.codes_map, full, to + s / 2 * kCodeBytes,
                           (k_tile + s) * kSliceSm90 * kBits / 16,
                           work.out_column + 64 * group + b * columns, work.weight);
          }
        }
        k_tile += slices;
        at.Next();
      }
    });
  }

  static bool AsksForSmall(const QuantizedGemmSm90&) { return kHasSmall; }

  // A thread's reader of a tile's columns: its own and the one 8 further on, from stages of so many
  // slices.
  template <int kStageSlices>
  class Reader {
   public:
    __device__ Reader(const QuantizedGemmSm90& quantized, const Work& work, int column)
        : quantized_(quantized) {
      column += Row();
      // Sums are of all threads' k, so their scales are, too.
      const int mine = kScalesSums ? 0 : threadIdx.x % 4 * 32;
      const int k = work.l_k + mine, n = quantized.gemm.n;
      left_ = work.weight >= 0 ? quantized.elements - k : 0;
      // A column that is not there has the scales of one that is.
      const int first = min(column, n - 1), second = min(column + 8, n - 1);
      if constexpr (Codes::kInBlocks) {
        const int of_first = first / quantized.rows_each, of_second = second / quantized.rows_each;
        const int64_t line = static_cast<int64_t>(work.weight) * quantized.scale_lines + of_first;
        scales_ = static_cast<const char*>(quantized.scales) + line * quantized.scale_line;
        second_ = (of_second - of_first) * quantized.scale_line;
        const int block = k / quantized.columns_each;
        scales_ += block * Codes::kScaleSize;
        of_block_ = (block + 1) * quantized.columns_each - k;
      } else {
        const int64_t line = static_cast<int64_t>(work.weight) * n + first;
        scales_ = static_cast<const char*>(quantized.scales) + line * quantized.scale_line +
                  (k >> quantized.scale_shift) * Codes::kScaleSize;
        second_ = (second - first) * quantized.scale_line;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) LoadScales(i);
    }

    // As PackedWeights::Words: a thread's 32 codes of both columns, or by slices the 16 that one
    // slice multiplies.
    struct Words {
      static constexpr int kCodes = Tile::kWords;
      uint32_t codes[2][kCodes];
      uint32_t scales[2];  // affine: scale and bias

      __device__ uint32_t OfEachLoad() const {
        uint32_t each = 0;
#pragma unroll
        for (int i = 0; i < (kBySlices ? 1 : kCodes); ++i) each |= codes[0][i] | codes[1][i];
        return each;
      }
    };

    __device__ bool AllSmall(const char*) {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 2 * kAhead; ++i) {
        auto& loaded = next_[i / 2][i % 2];
        bits |= kHalf ? Codes::NotSmallHalves(loaded) : Codes::NotSmall(loaded);
      }
      return __all_sync(~0u, (bits & Codes::kNotSmall) == 0);
    }

    template <bool, ScaleRange kRange>
    __device__ Words Load(const char* codes, const char*, int slice) {
      Words words;
      if (!kScalesSums && slice % 2 == 0) NextScales<kRange>(slice);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const char* stage = codes + slice / 2 * kCodeBytes;
        if constexpr (kBySlices) {
          LoadWords<kBits / 2>(Tile::Half(stage, Row(), 8 * r, threadIdx.x % 4, slice % 2),
                               words.codes[r]);
        } else {
          if (slice % 2 == 0) Tile::Load(stage, Row() + 8 * r, threadIdx.x % 4, line_[r]);
#pragma unroll
          for (int i = 0; i < kBits; ++i) words.codes[r][i] = line_[r][i];
        }
        words.scales[r] = Codes::template OfHalf<kHalf>(now_[r], slice % 2, words.codes[r]);
      }
      return words;
    }

    // kSteps x 16 k from step `first` of a slice on.
    template <int kSteps, bool, ScaleRange kRange>
    __device__ void Read(const Words& words, int slice, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {  // step, pair of codes, and column
        const int p = 2 * first + i / 2 + (kBySlices ? 0 : slice % 2 * 8);
        if constexpr (kHalf) {
          a[i] = Codes::template HalfPairOf<kRange>(words.codes[i % 2], p, words.scales[i % 2]);
        } else {
          a[i] = Codes::template PairOf<kRange>(words.codes[i % 2], p, words.scales[i % 2]);
        }
      }
    }

    // Takes the scales of slice `slice` and the next one.
    template <ScaleRange kRange>
    __device__ void NextScales(int slice) {
      const auto& next = next_[slice / 2 % kAhead];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        now_[r] = kHalf ? Codes::template HalfWord<kRange>(next[r])
                        : Codes::template Word<kRange>(next[r]);
      }
      LoadScales(slice / 2 % kAhead);
    }

    // kSums: the scale of column r, of the 128 k that were taken last.
    __device__ float Scale(int r) const { return AsFloat(now_[r]); }

   private:
    // 128s of k: a whole stage, so that all are known when one begins that may ask. Half of one is
    // too late for the many of nvfp4.
    static constexpr int kAhead = kStageSlices / 2;

    __device__ static int Row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

    // Load the scales of the next 128 k to next_[at]. Past the end x has zeros, and scales are any
    // number.
    __device__ void LoadScales(int at) {
      if constexpr (Codes::kInBlocks) return LoadBlockScales(at);
      const int64_t to_bias =
          static_cast<const char*>(quantized_.biases) - static_cast<const char*>(quantized_.scales);
#pragma unroll
      for (int i = 0; i < (Codes::kHasBiases ? 4 : 2); ++i) {
        const int r = i % 2;
        next_[at][r][i / 2] = Codes::kHasBiases ? 0x3f80 : 0;
        if (left_ <= 0) continue;
        const char* from = scales_ + (r == 0 ? 0 : second_) + (i < 2 ? 0 : to_bias);
        if constexpr (Codes::kBlockScales == 2) {
          next_[at][r][i / 2] = __ldg(reinterpret_cast<const uint16_t*>(from));
        } else {
          next_[at][r][i / 2] = __ldg(reinterpret_cast<const uint8_t*>(from));
        }
      }
      scales_ += (128 >> quantized_.scale_shift) * Codes::kScaleSize;
      left_ -= 128;
    }

    // The same of blocks, which have whole 128 columns.
    __device__ void LoadBlockScales(int at) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const char* from = scales_ + (r == 0 ? 0 : second_);
        next_[at][r][0] = left_ <= 0 ? 0 : __ldg(reinterpret_cast<const uint32_t*>(from));
      }
      left_ -= 128;
      of_block_ -= 128;
      if (of_block_ <= 0) {
        of_block_ += quantized_.columns_each;
        scales_ += Codes::kScaleSize;
      }
    }

    const QuantizedGemmSm90& quantized_;
    const char* scales_;  // of the next 128 k of the first column
    int second_;          // bytes to those of the second
    int left_;            // k from this thread's next on
    int of_block_;        // ... of a block of columns
    typename Codes::Loaded next_[kAhead][2];
    uint32_t now_[2];
    uint32_t line_[2][kBySlices ? 1 : kBits];
  };
};

}  // namespace jgg::device

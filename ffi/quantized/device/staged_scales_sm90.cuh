// Scales of weights in layout "linear" for x (T, N) @ W (N, K) with few rows: see
// transposed_lines_sm90.cuh. Two warps that do not multiply bring those of a slice to a stage, a
// lane those of a line: as the word that decoders take, of each 32 k, or of all 128 in blocks.
//
// Loads of scales take time: each line is in another 128 bytes of the L1 cache, and threads that
// multiply would ask for each line eight times.
#pragma once

#include <cstdint>

#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/packed_codes.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

constexpr int kScaleWarps = 2;

template <typename Codes>
struct StagedScales {
  static constexpr int kWords = Codes::kInBlocks ? 1 : 4;  // of a line
  static constexpr int kBytes = 64 * 4 * kWords;           // of a slice

  __device__ static uint32_t Word(const char* scales, int line, int piece) {
    uint32_t word;
    LoadWords<1>(scales + (line * kWords + piece % kWords) * 4, &word);
    return word;
  }

  // A warp's lines of a tile, of one slice after another.
  class Lines {
   public:
    __device__ Lines(const QuantizedGemmSm90& quantized, const Work& work, int line)
        : quantized_(quantized), line_(line), k_(work.out_column) {
      lines_ = work.weight >= 0 ? quantized.elements : 0;
      scales_ = static_cast<const char*>(quantized.scales);
      if constexpr (Codes::kInBlocks) {
        scales_ +=
            static_cast<int64_t>(work.weight) * quantized.scale_lines * quantized.scale_line +
            k_ / quantized.columns_each * Codes::kScaleSize;
      } else {
        const int64_t first = static_cast<int64_t>(work.weight) * quantized.elements + line;
        scales_ += first * quantized.scale_line + (k_ >> quantized.scale_shift) * Codes::kScaleSize;
      }
    }

    // Up to four groups' scales and biases, two in a word; in blocks, one scale. Lines that are not
    // there have zeros.
    struct Loaded {
      uint32_t words[2][2];
    };

    __device__ Loaded Next() {
      Loaded loaded = {};
      if (line_ < lines_) Load(loaded);
      line_ += 64;
      if constexpr (!Codes::kInBlocks) scales_ += 64 * quantized_.scale_line;
      return loaded;
    }

    __device__ void Store(const Loaded& loaded, char* to) const {
      if constexpr (Codes::kInBlocks) {
        StoreWords<1>(to, loaded.words[0]);
      } else {
        const int shift = quantized_.scale_shift;  // 5, 6 or 7
        const int last = shift == 5 ? 1 : 0;
        const auto word = [&](int which, bool higher) {
          return Permute(loaded.words[0][which], loaded.words[1][which], higher ? 0x7632 : 0x5410);
        };
        const uint32_t words[4] = {word(0, false), word(0, shift == 5),
                                   last ? word(1, false) : word(0, shift == 6),
                                   last ? word(1, true) : word(0, shift == 6)};
        StoreWords<4>(to, words);
      }
    }

   private:
    __device__ void Load(Loaded& loaded) const {
      if constexpr (Codes::kInBlocks) {
        const int line = static_cast<unsigned>(line_) / quantized_.rows_each;
        const char* from = scales_ + static_cast<int64_t>(line) * quantized_.scale_line;
        loaded.words[0][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
        return;
      }
      const int shift = quantized_.scale_shift, groups = (quantized_.gemm.n - k_ - 1 >> shift) + 1;
      const int64_t to_bias =
          static_cast<const char*>(quantized_.biases) - static_cast<const char*>(quantized_.scales);
#pragma unroll
      for (int array = 0; array < 2; ++array) {
        const char* from = scales_ + (array == 0 ? 0 : to_bias);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int here = min(128 >> shift, groups) - 2 * i;
          uint32_t& word = loaded.words[array][i];
          if (here >= 2 && quantized_.scale_line % 4 == 0) {
            word = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
          } else {
            const auto* const halves = reinterpret_cast<const uint16_t*>(from) + 2 * i;
            if (here >= 1) word = __ldg(halves);
            if (here >= 2) word |= __ldg(halves + 1) << 16;
          }
        }
      }
    }

    const QuantizedGemmSm90& quantized_;
    const char* scales_;  // of the slice's line; in blocks, of the matrix
    int line_, lines_, k_;
  };

  // Warp `warp` of kScaleWarps.
  template <typename Config>
  __device__ static void Copy(const QuantizedGemmSm90& quantized,
                              typename Config::SharedMemory& memory, int warp) {
    constexpr int kSlices = Config::kSlices;
    const int line = 32 * warp + threadIdx.x % 32;
    Place<Config::kStages> at;
    ForEachWork<Config>(memory, [&](const Work& work) {
      Lines lines(quantized, work, line);
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += kSlices) {
        typename Lines::Loaded loaded[kSlices];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) loaded[s] = lines.Next();
        Wait(&memory.empty[at.index], at.parity ^ 1);
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          lines.Store(loaded[s], memory.scales[at.index][s] + line * 4 * kWords);
        }
        __syncwarp();
        ArriveFor(&memory.full[at.index]);
        at.Next();
      }
    });
  }
};

}  // namespace jgg::device

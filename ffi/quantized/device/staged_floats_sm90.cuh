// Scales of weights in layout "linear", and biases, in float32, for
// transposed_scaled_lines_sm90.cuh: as staged_scales_sm90.cuh brings them, but by groups of k, each
// of which has those of 64 lines.
#pragma once

#include <cstdint>

#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/packed_codes.cuh"
#include "quantized/device/staged_scales_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

template <typename Codes>
struct StagedFloats {
  static constexpr int kArrays = Codes::kHasBiases ? 2 : 1;
  static constexpr int kMostGroups = Codes::kInBlocks ? 1 : 4;  // of 128 k
  static constexpr int kGroupBytes = 64 * 4 * kArrays;          // of a slice
  static constexpr int kBytes = kMostGroups * kGroupBytes;

  // Groups of 128 k.
  __device__ static int Groups(const QuantizedGemmSm90& quantized) {
    return Codes::kInBlocks ? 1 : max(128 >> quantized.scale_shift, 1);
  }

  // Where those of the warpgroup's 64 k are.
  __device__ static int First(const QuantizedGemmSm90& quantized, int group) {
    return Groups(quantized) * group / 2 * kGroupBytes;
  }

  // A lane's lines of a tile, of one slice after another: so many groups, of 16 bits or float32.
  template <int kGroups, bool kFloat32>
  class Lines {
    static constexpr int kSize = kFloat32 ? 4 : 2;
    static constexpr int kWords = (kGroups * kSize + 3) / 4;  // of an array's scales

   public:
    static constexpr int kLoadedWords = kArrays * kWords;

    __device__ Lines(const QuantizedGemmSm90& quantized, const Work& work, int line)
        : quantized_(quantized), line_(line) {
      const int k = work.out_column;
      lines_ = work.weight >= 0 ? quantized.elements : 0;
      from_ = static_cast<const char*>(quantized.scales);
      if constexpr (Codes::kInBlocks) {
        from_ += static_cast<int64_t>(work.weight) * quantized.scale_lines * quantized.scale_line +
                 k / quantized.columns_each * kSize;
      } else {
        const int64_t first = static_cast<int64_t>(work.weight) * quantized.elements + line;
        from_ += first * quantized.scale_line + (k >> quantized.scale_shift) * kSize;
        to_biases_ =
            static_cast<const char*>(quantized.biases) - static_cast<const char*>(quantized.scales);
        groups_ = min(kGroups, (quantized.gemm.n - k - 1 >> quantized.scale_shift) + 1);
        // Of each line alike, if lines are.
        const auto bits = reinterpret_cast<uintptr_t>(from_) |
                          reinterpret_cast<uintptr_t>(from_ + to_biases_) |
                          static_cast<uintptr_t>(quantized.scale_line);
        whole_ = groups_ == kGroups && bits % (kGroups * kSize) == 0;
      }
    }

    struct Loaded {
      uint32_t words[kArrays][kWords];
    };

    // Lines and groups that are not there have zeros.
    __device__ Loaded Next() {
      Loaded loaded = {};
      if (line_ < lines_) Load(loaded);
      line_ += 64;
      if constexpr (!Codes::kInBlocks) from_ += 64 * quantized_.scale_line;
      return loaded;
    }

    __device__ void Store(const Loaded& loaded, char* to) const {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint32_t both[kArrays];
#pragma unroll
        for (int i = 0; i < kArrays; ++i) both[i] = AsBits(Float(loaded.words[i], g));
        StoreWords<kArrays>(to + g * kGroupBytes, both);
      }
    }

   private:
    __device__ float Float(const uint32_t (&words)[kWords], int g) const {
      if constexpr (kFloat32) return AsFloat(words[g]);
      const uint32_t bits = words[g / 2] >> (16 * (g % 2)) & 0xffff;
      return quantized_.packed.half_scales ? HalfToFloat(bits) : AsFloat(bits << 16);
    }

    __device__ void Load(Loaded& loaded) const {
      if constexpr (Codes::kInBlocks) {
        const int line = static_cast<unsigned>(line_) / quantized_.rows_each;
        const char* from = from_ + static_cast<int64_t>(line) * quantized_.scale_line;
        loaded.words[0][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
        return;
      }
#pragma unroll
      for (int i = 0; i < kArrays; ++i) {
        const char* from = from_ + (i == 0 ? 0 : to_biases_);
        uint32_t* words = loaded.words[i];
        if (whole_ && kGroups * kSize >= 4) {
          if constexpr (kWords == 4) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
          } else if constexpr (kWords == 2) {
            const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
            words[0] = two.x, words[1] = two.y;
          } else {
            words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
          }
          continue;
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (g >= groups_) continue;
          if constexpr (kFloat32) {
            words[g] = __ldg(reinterpret_cast<const uint32_t*>(from) + g);
          } else {
            words[g / 2] |=
                static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(from) + g))
                << (16 * (g % 2));
          }
        }
      }
    }

    const QuantizedGemmSm90& quantized_;
    const char* from_;  // of the slice's line; in blocks, of the matrix
    int64_t to_biases_ = 0;
    int line_, lines_, groups_ = 1;
    bool whole_ = false;  // a line's scales are one aligned load
  };

  // Warp `warp` of kScaleWarps.
  template <typename Config>
  __device__ static void Copy(const QuantizedGemmSm90& quantized,
                              typename Config::SharedMemory& memory, int warp) {
    if constexpr (Codes::kInBlocks) {
      CopyLines<Config, Lines<1, true>>(quantized, memory, warp);
    } else {
      const auto copy = [&](auto floats) {
        switch (Groups(quantized)) {
          case 1: return CopyLines<Config, Lines<1, floats.value>>(quantized, memory, warp);
          case 2: return CopyLines<Config, Lines<2, floats.value>>(quantized, memory, warp);
          default: return CopyLines<Config, Lines<4, floats.value>>(quantized, memory, warp);
        }
      };
      if (quantized.packed.float_scales) return copy(std::true_type{});
      copy(std::false_type{});
    }
  }

 private:
  // Loads are a stage ahead of the one that is waited for, if there are registers.
  template <typename Config, typename Lines>
  __device__ static void CopyLines(const QuantizedGemmSm90& quantized,
                                   typename Config::SharedMemory& memory, int warp) {
    constexpr int kSlices = Config::kSlices;
    constexpr bool kAhead = Lines::kLoadedWords <= 4;
    const int line = 32 * warp + threadIdx.x % 32;
    Place<Config::kStages> at;
    ForEachWork<Config>(memory, [&](const Work& work) {
      Lines lines(quantized, work, line);
      typename Lines::Loaded next[kSlices];
#pragma unroll
      for (int s = 0; s < (kAhead ? kSlices : 0); ++s) next[s] = lines.Next();
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += kSlices) {
        typename Lines::Loaded loaded[kSlices];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          if (kAhead) loaded[s] = next[s];
          (kAhead ? next : loaded)[s] = lines.Next();
        }
        Wait(&memory.empty[at.index], at.parity ^ 1);
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          lines.Store(loaded[s], memory.scales[at.index][s] + line * 4 * kArrays);
        }
        __syncwarp();
        ArriveFor(&memory.full[at.index]);
        at.Next();
      }
    });
  }
};

}  // namespace jgg::device

// Weights in layout "linear", as checkpoints have them: lines of codes, contiguous along k. A stage
// has 128 k of 64 columns: their codes by TMA, swizzled, their scales by `cp.async`, word by word,
// because nothing aligns them. Threads pick their codes byte by byte (two codes of four bits are
// neighbours in k, as WGMMA wants them), so that nothing has to be exchanged.
#pragma once

#include <cstdint>

#include "cuda_fp16.h"
#include "grouped_mm/device/ring_sm90.cuh"
#include "quantized/device/registers_sm90.cuh"
#include "quantized/gemm_sm90.h"

namespace jgg::device {

// A mode's decoder: `Scale` of a column and some k, and two codes, neighbours in k, times it.
template <Mode kMode, int kBits>
struct LinearCodes;

// A pair of e2m1 codes in a byte, 2^-126 times their value.
__device__ inline uint32_t E2M1Pair(uint32_t byte) {
  // The byte twice, 12 bits apart: the codes are then in the same place of both halves. Products,
  // not shifts: the pipe of shifts and masks is the busiest.
  const uint32_t one = gridDim.z;  // which the compiler does not know
  return (byte * (one * 0x00040040u) & 0x01c001c0u) | (byte * (one * 0x01001000u) & 0x80008000u);
}

template <>
struct LinearCodes<Mode::kNvfp4, 4> {
  static constexpr float kFactor = 0x1p19f;
  using Scale = uint32_t;  // 2^107 times it, twice

  __device__ static uint32_t Entry(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 0x7f) == 0x7f) return 0x7fc07fc0;
    const float unit = AsFloat((max(exponent, 1u) - 10 + 107 + 127) << 23);
    const uint32_t bits = AsBits(static_cast<float>(mantissa + (exponent ? 8 : 0)) * unit) >> 16;
    return bits | bits << 16;
  }

  __device__ static uint32_t Pair(uint32_t codes, Scale scale) {
    return Multiply2(E2M1Pair(codes), scale);
  }
};

template <>
struct LinearCodes<Mode::kMxfp4, 4> {
  static constexpr float kFactor = 1;
  using Scale = uint32_t;  // twice

  __device__ static uint32_t Entry(uint32_t byte) {
    const uint32_t bits = byte == 0 ? 0x0040 : byte == 255 ? 0x7fc0 : byte << 7;
    return bits | bits << 16;
  }

  __device__ static uint32_t Pair(uint32_t codes, Scale scale) {
    return Multiply2(Multiply2(E2M1Pair(codes), k2To126), scale);
  }
};

template <>
struct LinearCodes<Mode::kMxfp8, 8> {
  static constexpr float kFactor = 1;
  using Scale = float;

  __device__ static uint32_t Entry(uint32_t byte) {
    return byte == 0 ? 0x00400000 : byte == 255 ? 0x7fc00000 : byte << 23;
  }

  __device__ static uint32_t Pair(uint32_t codes, Scale scale) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return Round2<DType::kBF16>(Multiply(values.x, scale), Multiply(values.y, scale));
  }
};

template <>
struct LinearCodes<Mode::kAffine, 4> {
  static constexpr float kFactor = 1;

  struct Scale {
    uint32_t scale, bias;  // each twice
    __device__ Scale(uint32_t s, uint32_t b) : scale(Twice(s, 0)), bias(Twice(b, 0)) {}
    Scale() = default;
  };

  __device__ static uint32_t Pair(uint32_t codes, Scale scale) {
    return AffinePair(codes * (gridDim.z * 0x1001u), scale.scale, scale.bias);
  }
};

template <>
struct LinearCodes<Mode::kAffine, 8> {
  static constexpr float kFactor = 1;

  struct Scale {
    float scale, bias;
    __device__ Scale(uint32_t s, uint32_t b) : scale(AsFloat(s << 16)), bias(AsFloat(b << 16)) {}
    Scale() = default;
  };

  __device__ static uint32_t Pair(uint32_t codes, Scale scale) {
    const auto value = [&](uint32_t selector) {
      const float code = AsFloat(Permute(codes, 0x4b000000, selector)) - 0x1p23f;
      return Add(Multiply(code, scale.scale), scale.bias);
    };
    return Round2<DType::kBF16>(value(0x7440), value(0x7441));
  }
};

template <Mode kMode, int kBits>
struct LinearWeights {
  using Codes = LinearCodes<kMode, kBits>;
  static constexpr float kFactor = Codes::kFactor;
  static constexpr bool kAffine = kMode == Mode::kAffine;
  static constexpr int kMostRows = kMode == Mode::kNvfp4 ? 128 : 192;  // that registers allow
  static constexpr int kBlocksPerSm = kAffine && kBits == 8 ? 1 : 2;   // likewise, for few rows
  static constexpr bool kAlwaysWarps = kBits == 8;  // with few rows: faster than WGMMA
  static constexpr bool kLoadsLate = false;         // there is nothing to load
  static constexpr bool kWholeStages = false;
  static constexpr int kFewRowsSlices = 2;  // a box of codes
  static constexpr int kLineBytes = 128 * kBits / 8, kCodeBytes = 64 * kLineBytes;
  // Of a column: as many words as scales (or biases) may touch.
  static constexpr int kScaleWords = kAffine || kMode == Mode::kNvfp4 ? 3 : 2;
  static constexpr int kPartBytes = 64 * 4 * kScaleWords;
  static constexpr int kScaleBytes = (kAffine ? 2 : 1) * kPartBytes;
  static constexpr int kCopiers = 1 + 32;

  struct Table {
    uint32_t scales[kAffine ? 1 : 256];
  };

  __device__ static void Fill(Table& table) {
    if constexpr (!kAffine) {
      for (uint32_t byte = threadIdx.x; byte < 256; byte += blockDim.x) {
        table.scales[byte] = Codes::Entry(byte);
      }
    }
  }

  template <typename Config>
  __device__ static void Copy(const QuantizedGemmSm90& quantized,
                              typename Config::SharedMemory& memory, int group) {
    const GemmSm90& gemm = quantized.gemm;
    const int lane = threadIdx.x % 32;
    const bool gated = IsGated(gemm.epilogue.activation);
    const int columns = gated ? gemm.n / 2 : gemm.n;
    Place<Config::kStages> at;
    ForEachWork<Config>(memory, [&](const Work& work) {
      const int first = work.out_column + 64 * group;
      const bool exists = first < columns;
#pragma unroll 1
      for (int slice = 0; slice < work.slices; slice += 2) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        if (lane == 0) ArriveExpecting(full, exists ? Config::kBlocks * kCodeBytes : 0);
#pragma unroll
        for (int b = 0; b < Config::kBlocks; ++b) {
          if (!exists) break;
          const int column = first + b * columns;
          if (lane == 0) {
            CopyBox(&quantized.codes_map, full, memory.codes[at.index][b][group],
                    slice * kSliceSm90 * kBits / 16, column, work.weight);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = lane + 32 * i;
            if (column + row >= gemm.n) continue;
            char* to = memory.scales[at.index][b][group] + row * 4 * kScaleWords;
            CopyScales(quantized, quantized.scales, work.weight, column + row, slice, to);
            if (kAffine) {
              CopyScales(quantized, quantized.biases, work.weight, column + row, slice,
                         to + kPartBytes);
            }
          }
        }
        ArriveCopied(full);
        at.Next();
      }
    });
  }

  // What a thread reads of a tile's columns: of its own and the one 8 further on.
  class Reader {
   public:
    __device__ Reader(const QuantizedGemmSm90& quantized, const Table& table, int weight,
                      int column)
        : table_(table), scale_shift_(quantized.scale_shift) {
      const int lane = threadIdx.x % 32;
      row_ = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        line_[i] = LineStart(quantized, weight, column + row_ + 8 * i);
      }
    }

    // As of PackedWeights; nothing is loaded before it is decoded.
    struct Words {};

    __device__ static Words Load(const char*, const char*, int) { return {}; }

    template <int kSteps, bool kFewRows>
    __device__ void Read(const Words&, const char* codes, const char* scales, int k, int half,
                         int first, uint32_t* a) const {
      typename Codes::Scale scale[2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = half * 4 + first + i;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (kMode == Mode::kNvfp4 || i % 2 == 0) scale[r] = ReadScale(scales, k, step, r);
#pragma unroll
          for (int p = 0; p < 2; ++p) {  // k and k + 8
            a[4 * i + 2 * p + r] = Codes::Pair(ReadPair(codes, step, r, p), scale[r]);
          }
        }
      }
    }

   private:
    __device__ uint32_t ReadPair(const char* codes, int step, int r, int p) const {
      const char* line = codes + (row_ + 8 * r) * kLineBytes;
      const int at = threadIdx.x % 4;
      if constexpr (kBits == 4) {
        const int piece = step / 2 ^ (row_ / 2 % 4);  // 64-byte swizzle; the same 8 rows on
        return static_cast<uint8_t>(line[piece * 16 + step % 2 * 8 + p * 4 + at]);
      } else {
        const int piece = step ^ (row_ % 8);  // 128-byte swizzle
        return *reinterpret_cast<const uint16_t*>(line + piece * 16 + p * 8 + 2 * at);
      }
    }

    __device__ typename Codes::Scale ReadScale(const char* scales, int k, int step, int r) const {
      const char* row = scales + (row_ + 8 * r) * 4 * kScaleWords;
      if constexpr (kAffine) {
        const int offset = (step * 16 >> scale_shift_) * 2, before = (k >> scale_shift_) * 2;
        const auto read = [&](const char* part) {
          return *reinterpret_cast<const uint16_t*>(part + ((line_[r] + before) & 3) + offset);
        };
        return {read(row), read(row + kPartBytes)};
      } else {
        constexpr int kEach = kMode == Mode::kNvfp4 ? 16 : 32;
        const uint8_t byte = row[((line_[r] + k / kEach) & 3) + step * 16 / kEach];
        if constexpr (kBits == 4) {
          return table_.scales[byte];
        } else {
          return AsFloat(table_.scales[byte]);
        }
      }
    }

    const Table& table_;
    const int scale_shift_;
    int row_;
    uint32_t line_[2];
  };

 private:
  // Where a column's scales (and biases) begin: the last bits of the address, since the arrays are
  // aligned to words.
  __device__ static uint32_t LineStart(const QuantizedGemmSm90& quantized, int weight, int column) {
    return static_cast<uint32_t>(weight * quantized.gemm.n + column) *
           static_cast<uint32_t>(quantized.scale_line);
  }

  // The words that hold a column's scales of a stage; zeros behind the line's end.
  __device__ static void CopyScales(const QuantizedGemmSm90& quantized, const void* scales,
                                    int weight, int column, int slice, char* to) {
    const int64_t line = static_cast<int64_t>(weight) * quantized.gemm.n + column;
    const char* begin = static_cast<const char*>(scales) + line * quantized.scale_line;
    const char* end = begin + quantized.scale_line;
    const int size = kAffine ? 2 : 1;
    const char* from = begin + (slice * kSliceSm90 >> quantized.scale_shift) * size;
    const int shift = reinterpret_cast<uintptr_t>(from) % 4;
    const int words = (shift + (128 >> quantized.scale_shift) * size + 3) / 4;
    from -= shift;
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) {
      const int64_t left = end - (from + 4 * i);
      if (i < words) {
        CopyWord(from + 4 * i, to + 4 * i, static_cast<int>(left < 0 ? 0 : left < 4 ? left : 4));
      }
    }
  }
};

}  // namespace jgg::device

// Codes and scales of tiles of few rows (few_rows_sm80.cuh): from global memory to a ring, and from
// there to registers.
#pragma once

#include <cstdint>

#include "grouped_mm/device/schedule_sm80.cuh"
#include "quantized/device/line_format.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg::device {

// Makes the compiler keep a pointer, rather than compute it again in every step.
template <typename T>
__device__ T* Kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Copies codes of a tile's columns to the ring; reads those of this thread, and their scales.
template <typename Config>
class CodeReader {
  using Weights = typename Config::Weights;
  static constexpr int kBits = Weights::kBits, kPiece = Weights::kPiece;
  static constexpr int kPieces = Weights::kPieces;
  static constexpr int kCodes = 32 * Weights::kBlocks;          // of a thread in a step
  static constexpr int kStepBytes = Config::kStep / 8 * kBits;  // of a column in a step

 public:
  // Columns of a tile from tile.n0 on, tile.n_count of them in either half.
  __device__ CodeReader(const QuantizedGemmSm80& gemm, const Tile& tile, int64_t weight) {
    const int half = IsGated(gemm.gemm.epilogue.activation) ? Config::kN / 2 : Config::kN;
    const int64_t line_bytes = gemm.w.elements / 8 * kBits;
    const int j = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      // A column that does not exist gets the codes of one that does.
      const int in_half = min(column % half, tile.n_count - 1);
      const int64_t line =
          weight * gemm.w.lines + tile.n0 + in_half + (column < half ? 0 : gemm.gemm.n / 2);
      const int64_t scales = line * gemm.slice.scale_line + Group(gemm, kCodes * j);
      const auto at = [](const void* data, int64_t bytes) {
        return Kept(static_cast<const char*>(data) + bytes);
      };
      codes_[r] = at(gemm.w.packed, line * line_bytes + Weights::kCopy * j);
      scales_[r] = at(gemm.w.scales, scales);
    }
    elements_ = static_cast<int>(gemm.w.elements);
    line_bytes_ = static_cast<int>(line_bytes);
    to_bias_ =
        reinterpret_cast<intptr_t>(gemm.w.biases) - reinterpret_cast<intptr_t>(gemm.w.scales);
    scale_step_ = Group(gemm, Config::kStep);
    asm volatile("" : "+r"(scale_step_));
    one_group_ = Weights::kHasBiases && (1 << gemm.slice.group_bits) >= kCodes;
  }

  // Start copying this warp's codes of step `step`: the four threads of a column copy it together.
  __device__ void Start(unsigned char* place, int step) const {
    constexpr int kCopy = Weights::kCopy, kCopies = kStepBytes / kCopy;  // of a column
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCopies / 2; ++i) {
      // The copies of both columns are numbered; this is number 4 * i + lane.
      const bool second = 4 * i >= kCopies || (4 * i + 3 >= kCopies && 4 * i + lane >= kCopies);
      const int at = 4 * i + lane - (second ? kCopies : 0);
      const bool take = kStepBytes * step + kCopy * at < line_bytes_;  // or nothing is read
      unsigned char* to = place + Of(second, threadIdx.x / 4, at * (kCopy / kPiece));
      const char* from = (second ? codes_[1] : codes_[0]) + kStepBytes * step + (at - lane) * kCopy;
      if constexpr (kCopy == 16) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(from),
            *reinterpret_cast<cute::uint128_t*>(to), take);
      } else {
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint64_t>::copy(
            *reinterpret_cast<const uint64_t*>(from), *reinterpret_cast<uint64_t*>(to), take);
      }
    }
  }

  // This thread's codes of column `r`: of block `first` and the `kBlocks - 1` after it.
  template <int kBlocks>
  __device__ void Read(const unsigned char* place, int r, int first,
                       uint32_t (&words)[kBlocks][kBits]) const {
    constexpr int kBytes = 4 * kBits * kBlocks, kWide = kBytes % 16 == 0 ? 16 : 8;
    using Wide = cute::conditional_t<kWide == 16, uint4, uint2>;
    Wide pieces[kBytes / kWide];
#pragma unroll
    for (int i = 0; i < kBytes / kWide; ++i) {
      const int byte = 4 * kBits * first + i * kWide;
      const unsigned char* from =
          place + Of(r, threadIdx.x / 4, threadIdx.x % 4 * kPieces + byte / kPiece);
      pieces[i] = *reinterpret_cast<const Wide*>(from + byte % kPiece);
    }
#pragma unroll
    for (int i = 0; i < kBlocks * kBits; ++i) {
      words[i / kBits][i % kBits] = reinterpret_cast<const uint32_t*>(pieces)[i];
    }
  }

  // The bits of the scales and biases of step `step`, zeros past the end: of groups of 16, and of
  // float32, those of the first. Steps come in order.
  __device__ uint2 NextScales(const QuantizedGemmSm80& gemm, int r, int step) {
    uint2 bits = make_uint2(0, 0);
    if (Inside(step)) {
      bits.x = Bits(gemm, scales_[r]);
      if (Weights::kHasBiases) bits.y = Bits(gemm, scales_[r] + to_bias_);
    }
    scales_[r] += scale_step_;
    return bits;
  }

  // The scales of block `b` of step `step`, of which these are the bits, if they are not float32.
  // Before those of the next step are loaded.
  __device__ LineScales Line(const QuantizedGemmSm80& gemm, uint2 bits, int r, int b,
                             int step) const {
    if (Weights::kHasBiases && Halves(gemm)) {
      if (b == 0) return {bits.x, bits.y};
      if (!Inside(step)) return {0, 0};
      const char* at = scales_[r] - scale_step_ + 4 * b;
      return {Word(at), Word(at + to_bias_)};
    }
    return Weights::Scales(bits.x, bits.y, b, one_group_);
  }

  // Whether a fused multiply-add does for a block.
  __device__ static bool Fits(const QuantizedGemmSm80& gemm, const LineScales& line) {
    const bool fits = Weights::Fits(line);
    if constexpr (!Weights::kHasBiases) return fits;
    if (!Halves(gemm)) return fits && !AreFloats(gemm);
    return fits && !AreFloats(gemm) && Weights::Fits({line.scale >> 16, line.bias >> 16});
  }

  // Scales of block `b` of step `step` as float32, after those of the next step have been loaded:
  // read again, since registers are few.
  __device__ FloatScales Floats(const QuantizedGemmSm80& gemm, int r, int b, int step) const {
    FloatScales floats{};
    if (!Inside(step)) return floats;
    const char* at = scales_[r] - 2 * scale_step_ + Group(gemm, 32 * b);
    floats.scale[0] = floats.scale[1] = Float(gemm, at);
    floats.bias[0] = floats.bias[1] = Float(gemm, at + to_bias_);
    if (Halves(gemm)) {
      at += gemm.slice.scale_bytes;
      floats.scale[1] = Float(gemm, at);
      floats.bias[1] = Float(gemm, at + to_bias_);
    }
    return floats;
  }

  // Whether all codes of a thread in a step have one scale.
  __device__ bool OneGroup() const { return one_group_; }

 private:
  // Affine: whether groups are of 16, and whether scales are float32.
  __device__ static bool Halves(const QuantizedGemmSm80& gemm) {
    return gemm.slice.group_bits == 4;
  }
  __device__ static bool AreFloats(const QuantizedGemmSm80& gemm) {
    return gemm.slice.scale_bytes == 4;
  }

  // Whether step `step` has codes for this thread.
  __device__ bool Inside(int step) const {
    return Config::kStep * step + kCodes * static_cast<int>(threadIdx.x % 4) < elements_;
  }

  // Where piece `piece` of a column's step is: threads read, and copy, at one time only pieces in
  // different banks.
  __device__ static int Of(int r, int column, int piece) {
    if (kStepBytes == 128) piece ^= column % 2 * 5;
    return (r * 32 + column) * kStepBytes + piece * kPiece;
  }

  // Bytes of the scales of so many k, a multiple of a group or a part of one.
  __device__ static int Group(const QuantizedGemmSm80& gemm, int k) {
    const int size = Weights::kHasBiases ? gemm.slice.scale_bytes : Weights::kScaleSize;
    return (k >> gemm.slice.group_bits) * size;
  }

  __device__ static uint32_t Word(const char* at) {
    return __ldg(reinterpret_cast<const uint32_t*>(at));
  }

  __device__ static float Float(const QuantizedGemmSm80& gemm, const char* at) {
    if (AreFloats(gemm)) return AsFloat(Word(at));
    return AsFloat(static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(at))) << 16);
  }

  __device__ uint32_t Bits(const QuantizedGemmSm80& gemm, const char* scales) const {
    if constexpr (Weights::kHasBiases) {
      if (Halves(gemm) || AreFloats(gemm)) return Word(scales);
    }
    if constexpr (Weights::kHasBiases && Weights::kBlocks == 2) {
      if (one_group_) return __ldg(reinterpret_cast<const uint16_t*>(scales));
    }
    if constexpr (Weights::kScaleBytes == 4) {
      return __ldg(reinterpret_cast<const uint32_t*>(scales));
    } else if constexpr (Weights::kScaleBytes == 2) {
      return __ldg(reinterpret_cast<const uint16_t*>(scales));
    } else {
      return __ldg(reinterpret_cast<const uint8_t*>(scales));
    }
  }

  const char *codes_[2],
      *scales_[2];   // of each column: this thread's first, those of the next step
  int64_t to_bias_;  // bytes from a scale to its bias
  int line_bytes_, elements_;
  int scale_step_;  // bytes of scales from a step to the next
  bool one_group_;
};

}  // namespace jgg::device

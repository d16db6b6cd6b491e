// The kernel of fp8_dequantize: codes (R, C) and their scales to values. Blocks are of 128 columns,
// and of one row or of 128 rows of a matrix.
#pragma once

#include "fp8/device/quantize_block.cuh"
#include "quantized/device/decode.cuh"

namespace jgg::fp8::device {

using jgg::device::kSign;
using jgg::device::Narrow;
using jgg::device::Round2;

struct DequantizeParams {
  const uint8_t* codes;
  const float* scales;
  uint8_t* out;
  uint32_t pieces, of_line;  // all, and those of a line; a piece is stored as 16 bytes
  uint32_t blocks;           // of a line
  uint32_t rows, tiles;      // of a matrix with square blocks; tiles of 128 rows
};

inline constexpr int kDequantizeThreads = 256, kDequantizeSteps = 4;

template <DType kTo>
inline constexpr int kPieceCodes = 16 / Size(kTo);

// Codes times 2^-kExponent are float32 whose exponent and mantissa have a code's bits in place.
template <Element kElement>
inline constexpr int kExponent = kElement == Element::kE4M3 ? 120 : 112;

// Two codes, 2^-kExponent times their value, as pairs of bfloat16; `word` has each in the upper
// byte of a half.
template <Element kElement>
__device__ uint32_t PairOfCodes(uint32_t word) {
  constexpr int kShift = kElement == Element::kE4M3 ? 4 : 3;
  return jgg::device::MaskOr(word, 0x80008000, word >> kShift & (0x7f007f00 >> kShift));
}

// Whether one of four codes is NaN or infinite.
template <Element kElement>
__device__ bool IsSpecial(uint32_t codes) {
  constexpr uint32_t kUp = kElement == Element::kE4M3 ? 0x01010101 : 0x04040404;
  return (((codes & 0x7f7f7f7f) + kUp) & 0x80808080) != 0;
}

// The bits of code * scale, whatever they are.
template <DType kTo, Element kElement>
__device__ uint32_t AnyValue(uint32_t code, float scale) {
  const float power = AsFloat(static_cast<uint32_t>(127 + kExponent<kElement>) << 23);
  float value = Multiply(AsFloat(PairOfCodes<kElement>(code << 8) << 16), power);
  if (IsSpecial<kElement>(code)) {
    const bool endless = kElement == Element::kE5M2 && (code & 3) == 0;
    value = AsFloat(endless ? (code & 0x80) << 24 | kInfinity : 0x7fc00000);
  }
  return Narrow<kTo>(Multiply(value, scale));
}

// Values of four codes.
template <DType kTo, Element kElement>
__device__ void DecodeFour(uint32_t codes, float scale, uint32_t* words) {
  // A scale times 2^kExponent is exact, and so products are rounded once.
  if (fabsf(scale) < 0x1p7f && !IsSpecial<kElement>(codes)) {
    const float power = AsFloat(static_cast<uint32_t>(127 + kExponent<kElement>) << 23);
    const float factor = Multiply(scale, power);
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = PairOfCodes<kElement>(Permute(codes, 0, i == 0 ? 0x1404 : 0x3424));
      const float first = Multiply(AsFloat(pair << 16), factor);
      const float second = Multiply(AsFloat(pair & 0xffff0000), factor);
      if constexpr (kTo == DType::kF32) {
        words[2 * i] = AsBits(first);
        words[2 * i + 1] = AsBits(second);
      } else {
        words[i] = Round2<kTo>(first, second);
      }
    }
    return;
  }
  uint32_t values[4];
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = AnyValue<kTo, kElement>(codes >> 8 * i & 0xff, scale);
  JGG_UNROLL
  for (int i = 0; i < Size(kTo); ++i) {
    words[i] = kTo == DType::kF32 ? values[i] : values[2 * i] | values[2 * i + 1] << 16;
  }
}

template <DType kTo, Element kElement, bool kSquare>
__global__ void __launch_bounds__(kDequantizeThreads)
    DequantizeKernel(const __grid_constant__ DequantizeParams p) {
  constexpr int kCodes = kPieceCodes<kTo>, kWords = kCodes / 4;
  const uint32_t first = blockIdx.x * (kDequantizeThreads * kDequantizeSteps) + threadIdx.x;
  uint32_t codes[kDequantizeSteps][2];
  float scales[kDequantizeSteps];
  JGG_UNROLL
  for (int j = 0; j < kDequantizeSteps; ++j) {
    const uint32_t piece = first + j * kDequantizeThreads;
    codes[j][0] = codes[j][1] = 0;
    scales[j] = 0.0f;
    if (piece >= p.pieces) continue;
    if constexpr (kWords == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(p.codes) + piece);
      codes[j][0] = two.x;
      codes[j][1] = two.y;
    } else {
      codes[j][0] = __ldg(reinterpret_cast<const uint32_t*>(p.codes) + piece);
    }
    const uint32_t line = piece / p.of_line;
    const uint32_t block = piece % p.of_line / (128 / kCodes);
    uint32_t line_of_scales = line;
    if constexpr (kSquare) line_of_scales = line / p.rows * p.tiles + line % p.rows / 128;
    scales[j] = __ldg(p.scales + uint64_t{line_of_scales} * p.blocks + block);
  }
  JGG_UNROLL
  for (int j = 0; j < kDequantizeSteps; ++j) {
    const uint32_t piece = first + j * kDequantizeThreads;
    uint32_t words[4];
    JGG_UNROLL
    for (int i = 0; i < kWords; ++i) {
      DecodeFour<kTo, kElement>(codes[j][i], scales[j], words + 4 / kWords * i);
    }
    if (piece >= p.pieces) continue;
    reinterpret_cast<uint4*>(p.out)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace jgg::fp8::device

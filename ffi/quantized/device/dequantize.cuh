// dequantize: codes and scales to values (..., K). A lane decodes 32 codes at a time; warps store
// what their lanes have put in order in shared memory.
#pragma once

#include "quantized/device/global_scales.cuh"
#include "quantized/device/values.cuh"

namespace jgg::device {

inline constexpr int kDequantizeThreads = 256;
template <DType kTo>
inline constexpr int kDequantizeBlocks = kTo == DType::kF32 ? 3 : 4;  // per processor, at least

// A unit is 32 codes, of which the last may be the first 16 only.
struct DequantizeParams {
  const uint8_t *weight, *scales, *biases;
  uint8_t* out;
  int32_t halves;      // units, twice
  int32_t group_bits;  // 2^group_bits units share an affine scale; -1: halves have one each
  DType scale_dtype;
  // From a thread's unit to its next, in halves and in bytes; of scales, in units.
  int32_t step;
  int64_t weight_step, out_step;
  GlobalScaleSteps global_scales;
};

struct ScaleItself {
  __device__ float operator()(float global_scale) const { return global_scale; }
};

template <int kBits>
__device__ void LoadCodes(const uint8_t* at, bool whole, uint32_t (&words)[kBits]) {
  if (kBits % 2 == 0 && kBits != 4 && !whole) {  // half of it is there, if bits are even
    JGG_UNROLL
    for (int i = 0; i < kBits / 2; ++i) words[i] = __ldg(reinterpret_cast<const uint32_t*>(at) + i);
  } else if constexpr (kBits == 4) {
    const uint2 low = __ldg(reinterpret_cast<const uint2*>(at));
    const uint2 high = whole ? __ldg(reinterpret_cast<const uint2*>(at) + 1) : make_uint2(0, 0);
    words[0] = low.x, words[1] = low.y, words[2] = high.x, words[3] = high.y;
  } else if constexpr (kBits % 4 == 0) {
    JGG_UNROLL
    for (int i = 0; i < kBits / 4; ++i) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(at) + i);
      words[4 * i] = four.x, words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  } else if constexpr (kBits % 2 == 0) {
    JGG_UNROLL
    for (int i = 0; i < kBits / 2; ++i) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(at) + i);
      words[2 * i] = two.x, words[2 * i + 1] = two.y;
    }
  } else {
    JGG_UNROLL
    for (int i = 0; i < kBits; ++i) words[i] = __ldg(reinterpret_cast<const uint32_t*>(at) + i);
  }
}

// Scale and bias of a unit, or its scales, by number.
template <typename Format>
__device__ UnitScales LoadScales(const DequantizeParams& p, int64_t unit, bool whole) {
  if constexpr (Format::kScale == ScaleType::kScaleAndBias) {
    const auto load = [&](const uint8_t* at, int64_t group) -> uint32_t {
      if (p.scale_dtype == DType::kF32) return __ldg(reinterpret_cast<const uint32_t*>(at) + group);
      return __ldg(reinterpret_cast<const uint16_t*>(at) + group);
    };
    int64_t group = unit >> max(p.group_bits, 0);
    if (p.group_bits < 0) group *= 2;
    UnitScales scales{load(p.scales, group), load(p.biases, group), 0.0f, 0.0f};
    scales.third = scales.first, scales.fourth = scales.second;
    if (p.group_bits < 0 && whole) {
      scales.third = load(p.scales, group + 1), scales.fourth = load(p.biases, group + 1);
    }
    return scales;
  } else if constexpr (Format::kScalesOf32 == 2) {
    const uint8_t* at = p.scales + 2 * unit;
    const uint32_t both = whole ? __ldg(reinterpret_cast<const uint16_t*>(at)) : __ldg(at);
    return {both & 0xff, both >> 8, 0.0f, 0.0f, 0, 0};
  } else {
    static_assert(Format::kScale == ScaleType::kE8M0);
    return {__ldg(p.scales + unit), 0, 0.0f, 0.0f, 0, 0};
  }
}

// A warp's values in shared memory, in pieces of 16 bytes, which are exchanged among eight so that
// neither what lanes write nor what the warp reads meets a bank twice.
template <DType kTo>
class ValueStage {
 public:
  static constexpr int kPieces = kTo == DType::kF32 ? 8 : 4;  // of a lane

  __device__ ValueStage(uint4* stage, int lane) : stage_(stage), lane_(lane) {}

  __device__ void Write(int i, const Eight<kTo>& eight) const {
    constexpr int kWords = Eight<kTo>::kWords;
    JGG_UNROLL
    for (int j = 0; j < kWords / 4; ++j) {
      const uint32_t* words = eight.words + 4 * j;
      stage_[Place(kPieces * lane_ + kWords / 4 * i + j)] =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Value i of the lane, alone.
  __device__ void Write(int i, uint32_t bits) const {
    constexpr int kValues = 32 / kPieces;  // of a piece
    uint4* piece = stage_ + Place(kPieces * lane_ + i / kValues);
    if constexpr (kTo == DType::kF32) {
      reinterpret_cast<uint32_t*>(piece)[i % kValues] = bits;
    } else {
      reinterpret_cast<uint16_t*>(piece)[i % kValues] = static_cast<uint16_t>(bits);
    }
  }

  // `out` is where the warp's first value goes; `left` pieces are to be stored.
  __device__ void Store(uint8_t* out, int left) const {
    __syncwarp();
    JGG_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int piece = 32 * i + lane_;
      if (piece < left) reinterpret_cast<uint4*>(out)[piece] = stage_[Place(piece)];
    }
    __syncwarp();
  }

 private:
  static __device__ int Place(int piece) { return piece ^ piece / 8 % 8; }

  uint4* stage_;
  int lane_;
};

// nvfp4 to bfloat16, with columns in the order in which the Hopper kernel takes x beside linear
// weights of 4 bits (quantized/gemm_sm90.h). Lines are whole 128 k.
struct OrderedDecoder {
  static constexpr DType kTo = DType::kBF16;
  static constexpr int kBits = 4;
  static constexpr bool kGlobal = false;

  // 128 codes are 16 words, which four lanes share. Lane a takes every fourth word from a on,
  // instead of neighbours: it stores their pairs of codes that are four apart.
  static __device__ void Decode(const DequantizeParams& p, const uint8_t* weight, int64_t unit,
                                const ValueStage<kTo>& stage) {
    const int a = static_cast<int>(unit % 4);
    uint32_t words[4];
    JGG_UNROLL
    for (int j = 0; j < 4; ++j) {
      words[j] = __ldg(reinterpret_cast<const uint32_t*>(weight - 12 * a + 16 * j));
    }
    const uint2 scales = __ldg(reinterpret_cast<const uint2*>(p.scales + 2 * (unit - a)));
    Eight<kTo> eights[4];
    JGG_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t pairs[4];
      PairsOfE2M1(words[j], pairs);
      const uint32_t scale = (j < 2 ? scales.x : scales.y) >> (16 * (j % 2) + 8 * (a / 2));
      const Eight<kTo> values = Scale8<kTo>(pairs, ScaleOfE4M3(scale));
      JGG_UNROLL
      for (int b = 0; b < 4; ++b) {
        eights[b].words[j] =
            Permute(values.words[b / 2], values.words[b / 2 + 2], b % 2 == 0 ? 0x5410 : 0x7632);
      }
    }
    JGG_UNROLL
    for (int b = 0; b < 4; ++b) stage.Write(b, eights[b]);
  }
};

// 32 values of a lane, of which there are `halves` times 16.
template <typename Decoder>
__device__ void DecodeUnit(const DequantizeParams& p, const uint8_t* weight, int64_t unit,
                           int halves, float low, float high,
                           const ValueStage<Decoder::kTo>& stage) {
  constexpr int kBits = Decoder::kBits;
  uint32_t words[kBits] = {};
  UnitScales scales{};
  if (halves > 0) {
    LoadCodes(weight, halves > 1, words);
    scales = LoadScales<typename Decoder::Format>(p, unit, halves > 1);
  }
  scales.low = low, scales.high = high;
  const auto store = [&](int i, const Eight<Decoder::kTo>& eight) { stage.Write(i, eight); };
  if (Decoder::Decode(p.scale_dtype, words, scales, p.group_bits < 0, store)) return;
  const auto* codes = reinterpret_cast<const uint32_t*>(weight);
  JGG_NO_UNROLL
  for (int i = 0; i < min(16 * halves, 32); ++i) {
    const uint32_t code = CodeAt<kBits>(codes, i);
    stage.Write(i, Decoder::Value(p.scale_dtype, code, scales, i >= 16));
  }
}

template <>
__device__ inline void DecodeUnit<OrderedDecoder>(const DequantizeParams& p, const uint8_t* weight,
                                                  int64_t unit, int halves, float, float,
                                                  const ValueStage<DType::kBF16>& stage) {
  if (halves > 0) OrderedDecoder::Decode(p, weight, unit, stage);
}

template <typename Decoder>
__global__ void __launch_bounds__(kDequantizeThreads, kDequantizeBlocks<Decoder::kTo>)
    DequantizeKernel(const __grid_constant__ DequantizeParams p) {
  constexpr DType kTo = Decoder::kTo;
  constexpr int kBits = Decoder::kBits, kPieces = ValueStage<kTo>::kPieces;
  __shared__ uint4 stages[kDequantizeThreads / 32][32 * kPieces];
  const int thread = threadIdx.x, lane = thread % 32;
  const ValueStage<kTo> stage(stages[thread / 32], lane);
  int64_t unit = int64_t{blockIdx.x} * kDequantizeThreads + thread;
  int left = p.halves - 2 * static_cast<int>(unit - lane);  // from the warp's first unit on
  const uint8_t* weight_at = p.weight + 4 * kBits * unit;
  uint8_t* out_at = p.out + 16 * kPieces * (unit - lane);
  using Globals =
      std::conditional_t<Decoder::kGlobal, GlobalScales<ScaleItself>, NoGlobalScales<float>>;
  Globals globals(p.global_scales, 2 * static_cast<int32_t>(unit), 2 * lane < left);

  while (left > 0) {
    const int here = left - 2 * lane;  // from this lane's unit on
    float low = 0.0f, high = 0.0f;
    if (Decoder::kGlobal) {
      low = globals.Get();
      high = globals.Next(p.global_scales, here > 1);
    }
    DecodeUnit<Decoder>(p, weight_at, unit, here, low, high, stage);
    stage.Store(out_at, min(left, 64) * (kPieces / 2));
    unit += p.step / 2;
    left -= p.step;
    weight_at += p.weight_step;
    out_at += p.out_step;
    globals.Advance(p.global_scales, 2 * lane < left);
  }
}

}  // namespace jgg::device

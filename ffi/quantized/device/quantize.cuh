// quantize: w (..., K), of which every group_size elements along K share a scale, to codes and
// scales. Warps copy 2 KiB at a time to shared memory, where each lane finds 64 bytes of its own,
// and what comes next is on its way while they compute. Lanes that share a group agree on its scale
// by shuffles. coders.cuh has the arithmetic.
#pragma once

#include <type_traits>

#include "quantized/device/coders.cuh"
#include "quantized/device/global_scales.cuh"

namespace jgg::device {

inline constexpr int kQuantizeThreads = 256;
inline constexpr int kUnitBytes = 64;

// A unit is the elements of a lane: one group or two of them, or a part of one.
struct QuantizeParams {
  const uint8_t* w;
  uint8_t *weight, *scales, *biases;
  int32_t pieces;  // of 16 bytes, in w: 4 are a unit; the last may be half of one
  // From a block's first unit to the next block's, and to behind its own last piece.
  int32_t block_units, reach;
  int32_t lane_bits;  // 2^lane_bits lanes share a group: at most 8
  // To a thread's next unit, in pieces and in bytes.
  int32_t step;
  int64_t w_step, weight_step, scale_step;
  GlobalScaleSteps global_scales;
  uint32_t times;  // kNvfp4Times
};

template <DType kOf>
struct InverseMaker {
  __device__ Inverse operator()(float global_scale) const { return MakeInverse<kOf>(global_scale); }
};

// A warp's units in shared memory, twice: those that are read, and the next. In pieces of 16 bytes,
// which are exchanged among eight so that neither the warp's copies nor its lanes' reads meet a
// bank twice: of piece c that is c ^ (c / 8 % 8).
class UnitStages {
 public:
  static constexpr int kPieces = 32 * kUnitBytes / 16;  // of one

  __device__ UnitStages(uint4* stages, int lane)
      : lane_(lane),
        base_(reinterpret_cast<uint8_t*>(stages)),
        to_(16 * (lane ^ lane / 8)),
        from_(16 * (4 * lane ^ lane / 2 % 8)) {}

  // Begins to copy what comes after what was copied last: piece 32 * i + lane, for each i. `from`
  // is where this lane's first piece is; `left` pieces are there, those of the warp first.
  __device__ void Copy(const uint8_t* from, int left) {
    uint8_t* const stage = base_ + next_;
    next_ ^= 16 * kPieces;
#ifdef __CUDA_ARCH__
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(stage + to_));
    asm volatile(
        "{\n"
        ".reg .pred p0, p1, p2, p3;\n"
        "setp.gt.s32 p0, %3, 0;\n"
        "setp.gt.s32 p1, %3, 32;\n"
        "setp.gt.s32 p2, %3, 64;\n"
        "setp.gt.s32 p3, %3, 96;\n"
        "@p0 cp.async.cg.shared.global [%0], [%2], 16;\n"
        "@p1 cp.async.cg.shared.global [%1 + 512], [%2 + 512], 16;\n"
        "@p2 cp.async.cg.shared.global [%0 + 1024], [%2 + 1024], 16;\n"
        "@p3 cp.async.cg.shared.global [%1 + 1536], [%2 + 1536], 16;\n"
        "cp.async.commit_group;\n"
        "}" ::"r"(to),
        "r"(to ^ 64), "l"(from), "r"(left - lane_)
        : "memory");
#else  // tests/lib/cuda_on_host.h
    for (int i = 0; i < 4 && left - lane_ > 32 * i; ++i) {
      const uint4 piece = __ldg(reinterpret_cast<const uint4*>(from + 512 * i));
      std::memcpy(stage + (to_ ^ i % 2 * 64) + 512 * i, &piece, 16);
    }
#endif
  }

  // This lane's unit, of those copied before the last, once all are there. Then more may come.
  __device__ void Read(uint32_t (&words)[16]) const {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    const uint8_t* const stage = base_ + next_;
    __syncwarp();
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint4 piece = *reinterpret_cast<const uint4*>(stage + (from_ ^ 16 * i));
      words[4 * i] = piece.x;
      words[4 * i + 1] = piece.y;
      words[4 * i + 2] = piece.z;
      words[4 * i + 3] = piece.w;
    }
    __syncwarp();
  }

 private:
  int lane_;
  uint8_t* base_;
  uint32_t to_, from_, next_ = 0;
};

__device__ inline float FromLane(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ inline Range FromLane(Range range, int mask) {
  return {FromLane(range.low, mask), FromLane(range.high, mask)};
}

// A lane's codes, at their own place.
template <int kBytes>
__device__ void StoreUnit(const uint32_t* words, uint8_t* at) {
  if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(at) = words[0];
  if constexpr (kBytes == 8) *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The codes of a warp's `count` units, 16 bytes at a time.
template <int kBytes>
__device__ void StoreWarp(const uint32_t* words, uint8_t* at, int lane, int count, uint4* stage) {
  __syncwarp();  // the stage has been read
  if constexpr (kBytes % 4 == 0) {
    JGG_UNROLL
    for (int i = 0; i < kBytes / 4; ++i) {
      reinterpret_cast<uint32_t*>(stage)[kBytes / 4 * lane + i] = words[i];
    }
  } else {
    JGG_UNROLL
    for (int i = 0; i < kBytes / 2; ++i) {
      reinterpret_cast<uint16_t*>(stage)[kBytes / 2 * lane + i] = words[i / 2] >> 16 * (i % 2);
    }
  }
  __syncwarp();
  JGG_UNROLL
  for (int i = lane; i < 2 * kBytes; i += 32) {
    const int rest = count * kBytes - 16 * i;
    const uint4 four = stage[i];
    if (rest >= 16) {
      reinterpret_cast<uint4*>(at)[i] = four;
    } else {  // groups have whole words
      if (rest > 0) reinterpret_cast<uint32_t*>(at)[4 * i] = four.x;
      if (rest > 4) reinterpret_cast<uint32_t*>(at)[4 * i + 1] = four.y;
      if (rest > 8) reinterpret_cast<uint32_t*>(at)[4 * i + 2] = four.z;
    }
  }
}

template <typename Coder>
struct QuantizeKernelTraits {
  static constexpr int kElements = kUnitBytes / Size(Coder::kOf);
  static constexpr int kGroups = kElements / Coder::kCount;
  static constexpr int kBytes = kElements * Coder::kBits / 8;  // of their codes
  static constexpr int kBlocks = kElements == 32 && (Coder::kBias || Coder::kGlobal) ? 3 : 4;
  static constexpr bool kStaged = kBytes != 4 && kBytes != 8 && kBytes != 16;
  static constexpr int kWords = (kBytes + 3) / 4;
  // The scales of a unit.
  using Scale =
      std::conditional_t<Coder::kBias,
                         std::conditional_t<Coder::kOf == DType::kF32, uint32_t, uint16_t>,
                         std::conditional_t<kGroups == 2, uint16_t, uint8_t>>;
};

template <typename Coder>
__global__ void __launch_bounds__(kQuantizeThreads, QuantizeKernelTraits<Coder>::kBlocks)
    QuantizeKernel(const __grid_constant__ QuantizeParams p) {
  using Traits = QuantizeKernelTraits<Coder>;
  using Scale = typename Traits::Scale;
  constexpr int kBytes = Traits::kBytes, kGroups = Traits::kGroups;
  constexpr int kWarps = kQuantizeThreads / 32;
  __shared__ uint4 stages[kWarps][2 * UnitStages::kPieces];
  __shared__ uint4 out_stages[Traits::kStaged ? kWarps : 1][Traits::kStaged ? 2 * kBytes : 1];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  UnitStages stage(stages[warp], lane);
  const int64_t before = int64_t{blockIdx.x} * p.block_units, unit = before + thread;
  const auto end = static_cast<int>(min(int64_t{p.pieces}, 4 * before + p.reach));
  int left = end - 4 * static_cast<int>(unit - lane);  // from the warp's first unit on
  if (left <= 0) return;
  const uint8_t* w_at = p.w + (unit - lane) * kUnitBytes + 16 * lane;
  uint8_t* weight_at = p.weight + (Traits::kStaged ? unit - lane : unit) * kBytes;
  uint8_t* scale_at = p.scales + (unit >> p.lane_bits) * sizeof(Scale);
  const int64_t to_bias = p.biases - p.scales;
  const int other_lanes = (1 << p.lane_bits) - 1;
  using Inverses = std::conditional_t<Coder::kGlobal, GlobalScales<InverseMaker<Coder::kOf>>,
                                      NoGlobalScales<Inverse>>;
  Inverses inverses(p.global_scales, kGroups * static_cast<int32_t>(unit), 4 * lane < left);

  stage.Copy(w_at, left);
  while (true) {
    const int here = left - 4 * lane;  // from this lane's unit on
    const bool inside = here > 0;
    left -= p.step;
    w_at += p.w_step;
    stage.Copy(w_at, left);
    uint32_t raw[16];
    stage.Read(raw);
    typename Coder::X x[kGroups];
    JGG_UNROLL
    for (int i = 0; i < 16; ++i) x[i * kGroups / 16].words[i % (16 / kGroups)] = raw[i];

    typename Coder::Group groups[kGroups];
    uint32_t words[Traits::kWords], scale = 0;
    bool doubt = false;
    JGG_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      auto part = Coder::Of(x[i]);
      if constexpr (kGroups == 1) {
        JGG_UNROLL
        for (int bit = 0; bit < 3; ++bit) {
          if (bit < p.lane_bits) part = Coder::Join(part, FromLane(part, 1 << bit));
        }
      }
      const bool exists = here > 2 * i;
      groups[i] =
          Coder::Make(part, i == 0 ? inverses.Get() : inverses.Next(p.global_scales, exists));
      scale |= Coder::Scale(groups[i]) << 8 * i;
      doubt |= Coder::Encode(x[i], groups[i], p.times, words + Traits::kWords / kGroups * i);
    }
    if constexpr (Coder::kDoubt) {
      if (AnyLane(doubt && inside)) {
        JGG_UNROLL
        for (int i = 0; i < kGroups; ++i) {
          Coder::Exactly(x[i], groups[i], words + Traits::kWords / kGroups * i);
        }
      }
    }
    JGG_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      Coder::Finish(groups[i], words + Traits::kWords / kGroups * i);
    }

    if constexpr (Traits::kStaged) {
      StoreWarp<kBytes>(words, weight_at, lane, min(here / 4 + lane, 32), out_stages[warp]);
    } else if (kGroups == 2 && here == 2) {  // half a unit
      StoreUnit<kBytes / 2>(words, weight_at);
    } else if (inside) {
      StoreUnit<kBytes>(words, weight_at);
    }
    if (kGroups == 2 && here == 2) {
      *scale_at = scale;
    } else if (inside && (lane & other_lanes) == 0) {
      *reinterpret_cast<Scale*>(scale_at) = scale;
      if constexpr (Coder::kBias) {
        *reinterpret_cast<Scale*>(scale_at + to_bias) = Coder::Bias(groups[0]);
      }
    }
    if (left <= 0) return;
    weight_at += p.weight_step;
    scale_at += p.scale_step;
    inverses.Advance(p.global_scales, 4 * lane < left);
  }
}

}  // namespace jgg::device

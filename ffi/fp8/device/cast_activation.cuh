// Gated activations with a known scale, as device/cast.cuh has matrices: codes of activation(h),
// or the largest magnitudes alone, where no scale is known yet; and the largest of its backward
// pass, whose codes cast_activation_backward.cuh makes. h (R, 2F) has the gate in its first half,
// and R is grouped.
#pragma once

#include "fp8/device/activation.cuh"
#include "fp8/device/cast.cuh"

namespace jgg::fp8::device {

// ---- the activation ----

struct ActivatedParams {
  QuantizeParams of;   // x is h, columns F; its codes may be null
  const float* known;  // one scale, where there are codes
  uint2* largest;      // (gridDim.x,)
};

inline constexpr int kActivatedSteps = 4;

// A thread has eight neighbouring elements, and as many more as are behind those of all thread
// blocks. There are fewer than 2^32 / 8.
template <DType kOf, Activation kActivation>
__global__ void __launch_bounds__(kLargestThreads)
    ActivatedKernel(const __grid_constant__ ActivatedParams cast) {
  struct Place {
    int64_t line, column;
  };
  __shared__ uint2 shared[kLargestThreads / 32];
  const QuantizeParams& p = cast.of;
  const auto of_line = static_cast<uint32_t>(p.columns / 8);
  const uint32_t pieces = static_cast<uint32_t>(*p.inside) * of_line;
  const uint32_t step = gridDim.x * kLargestThreads;
  SplitReciprocal by{};
  if (p.codes != nullptr) by = MakeSplitReciprocal(__ldg(cast.known));
  LargestPair largest;
  JGG_NO_UNROLL
  for (uint32_t first = blockIdx.x * kLargestThreads + threadIdx.x; first < pieces;
       first += kActivatedSteps * step) {
    Eight<kOf> x[kActivatedSteps];
    JGG_UNROLL
    for (int i = 0; i < kActivatedSteps; ++i) {
      const uint32_t piece = first + i * step;
      const Place at{piece / of_line, int64_t{piece % of_line} * 8};
      x[i] = ActivatedRow<kOf, kActivation>::Load(p, at, piece < pieces);
    }
    JGG_UNROLL
    for (int i = 0; i < kActivatedSteps; ++i) {
      const uint32_t piece = first + i * step;
      largest.Add<kOf>(x[i], LargestOf<kOf>(x[i]));
      if (p.codes != nullptr && piece < pieces) {
        reinterpret_cast<uint2*>(p.codes)[piece] = CastEight<Element::kE4M3, kOf>(x[i], by);
      }
    }
  }
  largest.Share<kLargestThreads>(shared);
  if (threadIdx.x == 0) cast.largest[blockIdx.x] = make_uint2(largest.all, largest.finite);
}

// ---- its backward pass ----

struct ActivationCastParams {
  const uint8_t *h, *d;    // (R, 2F), (R, F)
  const float* row_scale;  // (R,)
  int64_t rows, columns;   // R, F
  int64_t along;           // padded rows
  const int32_t* inside;   // rows of groups
  // DifferentiatedKernel has none of these. Rows of each 128 padded ones; scales of row_scale * dh
  // and of row_scale * activation(h); codes of dh, (R, 2F), and transposed, (2F, along); of the
  // activation, transposed, (F, along); and sums of d * activation(h) over 128 columns, (F / 128,
  // R).
  const TileRows* groups;
  const float* known;
  uint8_t *codes, *turned, *activated;
  float* sums;
  uint2* largest;  // (gridDim.x, 2), of both
};

// The largest magnitudes of row_scale * dh and of row_scale * activation(h) alone. A thread has
// eight neighbouring elements, and as many more as are behind those of all thread blocks. There are
// fewer than 2^32 / 8.
inline constexpr int kDifferentiatedSteps = 2;

template <DType kOf, Activation kActivation>
__global__ void __launch_bounds__(kLargestThreads, 4)
    DifferentiatedKernel(const __grid_constant__ ActivationCastParams p) {
  enum Part { kGate, kUp, kActivated, kParts };
  __shared__ uint2 shared[2][kLargestThreads / 32];
  const auto of_line = static_cast<uint32_t>(p.columns / 8);
  const uint32_t pieces = static_cast<uint32_t>(*p.inside) * of_line;
  const uint32_t step = gridDim.x * kLargestThreads;
  LargestPair of_dh, of_activated;
  JGG_NO_UNROLL
  for (uint32_t first = blockIdx.x * kLargestThreads + threadIdx.x; first < pieces;
       first += kDifferentiatedSteps * step) {
    Eight<kOf> x[kDifferentiatedSteps][kParts];
    float scales[kDifferentiatedSteps];
    JGG_UNROLL
    for (int i = 0; i < kDifferentiatedSteps; ++i) {
      const uint32_t piece = first + i * step, line = piece / of_line;
      const bool exists = piece < pieces;
      const int64_t column = piece % of_line * 8, at = line * p.columns;
      const uint8_t* gate = p.h + (2 * at + column) * kElementBytes<kOf>;
      x[i][kGate] = LoadEight<kOf>(gate, exists);
      x[i][kUp] = LoadEight<kOf>(gate + p.columns * kElementBytes<kOf>, exists);
      x[i][kActivated] = LoadEight<kOf>(p.d + (at + column) * kElementBytes<kOf>, exists);
      scales[i] = exists ? __ldg(p.row_scale + line) : 0.0f;
    }
    JGG_UNROLL
    for (int i = 0; i < kDifferentiatedSteps; ++i) {
      DifferentiateEight<kOf, kActivation>(x[i], scales[i]);
      of_dh.Add<kOf>(x[i][kGate], LargestOf<kOf>(x[i][kGate]));
      of_dh.Add<kOf>(x[i][kUp], LargestOf<kOf>(x[i][kUp]));
      of_activated.Add<kOf>(x[i][kActivated], LargestOf<kOf>(x[i][kActivated]));
    }
  }
  of_dh.Share<kLargestThreads>(shared[0]);
  of_activated.Share<kLargestThreads>(shared[1]);
  if (threadIdx.x == 0) {
    p.largest[2 * blockIdx.x] = make_uint2(of_dh.all, of_dh.finite);
    p.largest[2 * blockIdx.x + 1] = make_uint2(of_activated.all, of_activated.finite);
  }
}

}  // namespace jgg::fp8::device

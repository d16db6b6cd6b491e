// Gated activations with a known scale, as device/cast.cuh has matrices: codes of activation(h),
// and those of its backward pass; or the largest magnitudes alone, where no scale is known yet. h
// (R, 2F) has the gate in its first half, and R is grouped.
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

// Codes of a tile, transposed, to lines from `to` on. All threads put theirs, and then write.
__device__ inline void WriteTurned(TurnedBlock& turned, const ActivationPlace& at, int eight,
                                   const uint2 (&codes)[8], uint8_t* to, int64_t along) {
  turned.Put(at.lane, eight, codes);
  __syncthreads();
  turned.Write(to, along, kBlock, kBlock);
  __syncthreads();
}

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

// Thread blocks have tiles of 128 padded rows and 128 columns of F, which is a multiple of 128. A
// thread has eight rows of eight columns.
template <DType kOf, Activation kActivation, Element kElement>
__global__ void __launch_bounds__(kActivationThreads, 2)
    ActivationCastKernel(const __grid_constant__ ActivationCastParams p) {
  enum Part { kGate, kUp, kActivated, kParts };
  __shared__ TurnedBlock turned;
  __shared__ uint2 shared[2][kActivationThreads / 32];
  ActivationParams of{};
  of.columns = p.columns;
  of.groups = p.groups;
  const ActivationPlace at(of);
  if (at.rows.count <= 0) {  // of no group: nobody reads its codes
    if (threadIdx.x < 2) p.largest[2 * blockIdx.x + threadIdx.x] = make_uint2(0, 0);
    return;
  }
  const int eight = at.row / 8, odd = at.lane % 2;
  LargestPair of_dh, of_activated;
  const auto pitch = static_cast<uint32_t>(p.columns) * kElementBytes<kOf>;
  const uint32_t column = at.column() * kElementBytes<kOf>;
  const uint8_t* gate = RowOf(p.h + column, 2 * pitch, at.line(0));
  const uint8_t* d = RowOf(p.d + column, pitch, at.line(0));
  const SplitReciprocal by_dh = MakeSplitReciprocal(__ldg(p.known));
  const SplitReciprocal by_activated = MakeSplitReciprocal(__ldg(p.known + 1));
  const int own = at.lane % 8;
  const float own_scale = at.exists(own) ? __ldg(p.row_scale + at.line(own)) : 0.0f;
  float own_sum = 0.0f;
  uint2 codes[kParts][8];
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool exists = at.exists(i);
    Eight<kOf> x[kParts];
    x[kGate] = LoadEight<kOf>(RowOf(gate, 2 * pitch, i), exists);
    x[kUp] = LoadEight<kOf>(RowOf(gate + pitch, 2 * pitch, i), exists);
    x[kActivated] = LoadEight<kOf>(RowOf(d, pitch, i), exists);
    const float scale =
        __shfl_sync(0xffffffffu, own_scale, static_cast<int>(threadIdx.x % 32 / 16 * 16) + i);
    float sum = DifferentiateEight<kOf, kActivation>(x, scale);
    of_dh.Add<kOf>(x[kGate], LargestOf<kOf>(x[kGate]));
    of_dh.Add<kOf>(x[kUp], LargestOf<kOf>(x[kUp]));
    of_activated.Add<kOf>(x[kActivated], LargestOf<kOf>(x[kActivated]));
    codes[kGate][i] = CastEight<kElement, kOf>(x[kGate], by_dh);
    codes[kUp][i] = CastEight<kElement, kOf>(x[kUp], by_dh);
    codes[kActivated][i] = CastEight<Element::kE4M3, kOf>(x[kActivated], by_activated);
    JGG_UNROLL
    for (int mask = 1; mask < 16; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (own == i) own_sum = sum;
  }
  if (at.lane < 8 && at.exists(own)) {
    RowOf(p.sums + at.line(own), static_cast<uint32_t>(p.rows), at.tile)[0] = own_sum;
  }
  JGG_UNROLL
  for (int part = kGate; part <= kUp; ++part) {
    JGG_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const uint4 sixteen = SixteenOfRow(codes[part][i], codes[part][i + 1], odd);
      const uint32_t first = part * static_cast<uint32_t>(p.columns) + at.column() - 8 * odd;
      if (!at.exists(i + odd)) continue;
      *reinterpret_cast<uint4*>(
          RowOf(p.codes + first, static_cast<uint32_t>(2 * p.columns), at.line(i + odd))) = sixteen;
    }
  }
  const int64_t line = kBlock * at.tile, from = kBlock * at.tile_of_rows;
  uint8_t* to = p.turned + line * p.along + from;
  WriteTurned(turned, at, eight, codes[kGate], to, p.along);
  WriteTurned(turned, at, eight, codes[kUp], to + p.columns * p.along, p.along);
  WriteTurned(turned, at, eight, codes[kActivated], p.activated + line * p.along + from, p.along);
  of_dh.Share<kActivationThreads>(shared[0]);
  of_activated.Share<kActivationThreads>(shared[1]);
  if (threadIdx.x == 0) {
    p.largest[2 * blockIdx.x] = make_uint2(of_dh.all, of_dh.finite);
    p.largest[2 * blockIdx.x + 1] = make_uint2(of_activated.all, of_activated.finite);
  }
}

}  // namespace jgg::fp8::device

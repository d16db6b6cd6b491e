// The codes of a gated activation's backward pass, with known scales: see cast_activation.cuh.
#pragma once

#include "fp8/device/cast_activation.cuh"

namespace jgg::fp8::device {

// A tile of 128 x 128 of dh's halves and of the activation: h and d as they are stored, and then
// all codes, transposed.
struct ActivationCastShared {
  enum Part { kGate, kUp, kActivated, kParts };
  union {
    uint4 elements[kParts][kBlock][kBlock / 8];
    TurnedBlock turned[kParts];
  };
  uint2 largest[2][kActivationWarps];
};

// Thread blocks have tiles of 128 padded rows and 128 columns of F, which is a multiple of 128. A
// thread has eight rows of eight columns.
template <DType kOf, Activation kActivation, Element kElement>
__global__ void __launch_bounds__(kActivationThreads, 2)
    ActivationCastKernel(const __grid_constant__ ActivationCastParams p) {
  using Shared = ActivationCastShared;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  ActivationParams of{};
  of.h = p.h;
  of.d = p.d;
  of.columns = p.columns;
  of.groups = p.groups;
  const ActivationPlace at(of);
  if (at.rows.count <= 0) {  // of no group: nobody reads its codes
    if (threadIdx.x < 2) p.largest[2 * blockIdx.x + threadIdx.x] = make_uint2(0, 0);
    return;
  }
  CopyElements<kOf>(of, at, shared);
  const int eight = at.row / 8, odd = at.lane % 2, own = at.lane % 8;
  const SplitReciprocal by_dh = MakeSplitReciprocal(__ldg(p.known));
  const SplitReciprocal by_activated = MakeSplitReciprocal(__ldg(p.known + 1));
  const float own_scale = at.exists(own) ? __ldg(p.row_scale + at.line(own)) : 0.0f;
  float own_sum = 0.0f;
  LargestPair of_dh, of_activated;
  uint2 codes[Shared::kParts][8];
  WaitForCopies<1>();
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (i == 4) WaitForCopies<0>();
    Eight<kOf> x[Shared::kParts];
    JGG_UNROLL
    for (int part = 0; part < Shared::kParts; ++part) {
      x[part] = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
    }
    const float scale =
        __shfl_sync(0xffffffffu, own_scale, static_cast<int>(threadIdx.x % 32 / 16 * 16) + i);
    float sum = DifferentiateEight<kOf, kActivation>(x, scale);
    of_dh.Add<kOf>(x[Shared::kGate], LargestOf<kOf>(x[Shared::kGate]));
    of_dh.Add<kOf>(x[Shared::kUp], LargestOf<kOf>(x[Shared::kUp]));
    of_activated.Add<kOf>(x[Shared::kActivated], LargestOf<kOf>(x[Shared::kActivated]));
    codes[Shared::kGate][i] = CastEight<kElement, kOf>(x[Shared::kGate], by_dh);
    codes[Shared::kUp][i] = CastEight<kElement, kOf>(x[Shared::kUp], by_dh);
    codes[Shared::kActivated][i] =
        CastEight<Element::kE4M3, kOf>(x[Shared::kActivated], by_activated);
    JGG_UNROLL
    for (int mask = 1; mask < 16; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (own == i) own_sum = sum;
  }
  if (at.lane < 8 && at.exists(own)) {
    RowOf(p.sums + at.line(own), static_cast<uint32_t>(p.rows), at.tile)[0] = own_sum;
  }
  JGG_UNROLL
  for (int part = Shared::kGate; part <= Shared::kUp; ++part) {
    JGG_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const uint4 sixteen = SixteenOfRow(codes[part][i], codes[part][i + 1], odd);
      const uint32_t first = part * static_cast<uint32_t>(p.columns) + at.column() - 8 * odd;
      if (!at.exists(i + odd)) continue;
      *reinterpret_cast<uint4*>(
          RowOf(p.codes + first, static_cast<uint32_t>(2 * p.columns), at.line(i + odd))) = sixteen;
    }
  }
  // All threads meet here, so elements have been read; and once more, so codes are there.
  of_dh.Share<kActivationThreads>(shared.largest[0]);
  JGG_UNROLL
  for (int part = 0; part < Shared::kParts; ++part) {
    shared.turned[part].Put(at.lane, eight, codes[part]);
  }
  of_activated.Share<kActivationThreads>(shared.largest[1]);
  const int64_t line = kBlock * at.tile, from = kBlock * at.tile_of_rows;
  uint8_t* to = p.turned + line * p.along + from;
  shared.turned[Shared::kGate].Write(to, p.along, kBlock, kBlock);
  shared.turned[Shared::kUp].Write(to + p.columns * p.along, p.along, kBlock, kBlock);
  to = p.activated + line * p.along + from;
  shared.turned[Shared::kActivated].Write(to, p.along, kBlock, kBlock);
  if (threadIdx.x == 0) {
    p.largest[2 * blockIdx.x] = make_uint2(of_dh.all, of_dh.finite);
    p.largest[2 * blockIdx.x + 1] = make_uint2(of_activated.all, of_activated.finite);
  }
}

}  // namespace jgg::fp8::device

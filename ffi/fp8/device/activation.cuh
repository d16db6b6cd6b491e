// Gated activations beside FP8's quantizer: the codes of activation(h), and those of its backward
// pass, of which no array of h's dtype is ever stored. h (R, 2F) has the gate in its first half.
#pragma once

#include "fp8/device/quantize_tiles.cuh"
#include "grouped_mm/device/activation_derivative.cuh"

namespace jgg::fp8::device {

using jgg::device::Activated;
using jgg::device::Differentiate;
using jgg::device::Round2;

// ---- the activation, in blocks along columns ----

// RowsKernel's elements, rounded to h's dtype. p.columns is F.
template <DType kOf, Activation kActivation>
struct ActivatedRow {
  static constexpr bool kClearsRest = false;  // nobody reads them
  template <typename Place>
  __device__ static Eight<kOf> Load(const QuantizeParams& p, const Place& place, bool exists) {
    const uint8_t* at = p.x + (2 * place.line * p.columns + place.column) * kElementBytes<kOf>;
    Eight<kOf> gate = LoadEight<kOf>(at, exists);
    const Eight<kOf> up = LoadEight<kOf>(at + p.columns * kElementBytes<kOf>, exists);
    JGG_UNROLL
    for (int i = 0; i < Eight<kOf>::kWords; ++i) {
      const auto value = [&](int j) {
        return Differentiate<kActivation>(gate[2 * i + j], up[2 * i + j]).value;
      };
      gate.words[i] = Round2<kOf>(value(0), value(1));
    }
    return gate;
  }
};

// ---- its backward pass ----

// Each of the three results has its codes, scales and seed.
struct ActivationParams {
  const uint8_t *h, *d;       // (R, 2F), (R, F)
  const float* row_scale;     // (R,)
  int64_t rows, columns;      // R, F
  const TileRows* groups;     // of each 128 padded rows
  float* sums;                // (F / 128, R): of d * activation(h) over 128 columns
  QuantizeParams by_rows;     // row_scale * dh in blocks along columns
  QuantizeParams by_columns;  // the same along rows, transposed
  QuantizeParams activated;   // row_scale * activation(h) along rows, transposed
};

inline constexpr int kActivationThreads = 2 * kSpanThreads;
inline constexpr int kActivationWarps = kActivationThreads / 32;

// A tile of 128 x 128 of dh's halves and of the activation. A thread has eight rows of eight
// columns, sixteen lanes have a row.
struct ActivationShared {
  enum Part { kGate, kUp, kActivated, kParts };
  // What is stored of h and d, then what is quantized; at the end a part's codes.
  uint4 elements[kParts][kBlock][kBlock / 8];
  uint4 largest[kParts][kActivationWarps][kBlock / 8];
  SharedScale scales[kParts][kBlock];

  __device__ TransposedCodes* codes(int part) {  // two spans
    static_assert(2 * sizeof(TransposedCodes) <= sizeof(elements[0]), "");
    return reinterpret_cast<TransposedCodes*>(elements[part]);
  }
};

struct ActivationPlace {
  TileRows rows;         // of h
  int64_t tile_of_rows;  // padded
  int64_t tile;          // of 128 columns of F
  int lane, row;         // of a row; first of eight

  __device__ explicit ActivationPlace(const ActivationParams& p)
      : lane(threadIdx.x % 16), row(threadIdx.x / 16 * 8) {
    const auto across = static_cast<uint32_t>(p.columns / kBlock);
    tile_of_rows = blockIdx.x / across;
    tile = blockIdx.x % across;
    rows = p.groups[tile_of_rows];
  }

  __device__ bool exists(int i) const { return row + i < rows.count; }
  __device__ int64_t line(int i) const { return rows.first + row + i; }
  __device__ int64_t column() const { return kBlock * tile + 8 * lane; }
};

__device__ inline void CopyOrZero(uint4& to, const uint8_t* from, bool exists) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// A thread's own elements of h and d.
template <DType kOf>
__device__ void CopyElements(const ActivationParams& p, const ActivationPlace& at,
                             ActivationShared& shared) {
  constexpr int kBytes = kElementBytes<kOf>;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool exists = at.exists(i);
    const int64_t line = exists ? at.line(i) : 0;
    const uint8_t* h = p.h + (2 * line * p.columns + at.column()) * kBytes;
    const uint8_t* d = p.d + (line * p.columns + at.column()) * kBytes;
    const auto to = [&](int part) -> uint4& { return shared.elements[part][at.row + i][at.lane]; };
    CopyOrZero(to(ActivationShared::kGate), h, exists);
    CopyOrZero(to(ActivationShared::kUp), h + p.columns * kBytes, exists);
    CopyOrZero(to(ActivationShared::kActivated), d, exists);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <DType kOf>
__device__ Eight<kOf> EightOf(const uint4& four) {
  return {four.x, four.y, four.z, four.w};
}

template <DType kOf>
__device__ uint4 FourOf(const Eight<kOf>& x) {
  return make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
}

// What is stored becomes what is quantized: eight elements of a row. Returns their sum of d *
// activation(h).
template <DType kOf, Activation kActivation>
__device__ float DifferentiateEight(Eight<kOf> (&x)[ActivationShared::kParts], float scale) {
  auto &gate = x[ActivationShared::kGate], &up = x[ActivationShared::kUp],
       &d = x[ActivationShared::kActivated];
  float sum = 0.0f;
  JGG_UNROLL
  for (int word = 0; word < Eight<kOf>::kWords; ++word) {
    Activated f[2];
    float of_d[2];
    JGG_UNROLL
    for (int j = 0; j < 2; ++j) {
      f[j] = Differentiate<kActivation>(gate[2 * word + j], up[2 * word + j]);
      of_d[j] = d[2 * word + j];
    }
    // What was multiplied is the rounded activation.
    d.words[word] = Round2<kOf>(f[0].value, f[1].value);
    float value[2];
    JGG_UNROLL
    for (int j = 0; j < 2; ++j) {
      value[j] = d[2 * word + j];
      sum += of_d[j] * value[j];
      of_d[j] *= scale;
    }
    d.words[word] = Round2<kOf>(value[0] * scale, value[1] * scale);
    gate.words[word] = Round2<kOf>(of_d[0] * f[0].by_x, of_d[1] * f[1].by_x);
    up.words[word] = Round2<kOf>(of_d[0] * f[0].by_up, of_d[1] * f[1].by_up);
  }
  return sum;
}

// Scales and codes of a row of dh, in blocks along columns.
template <Element kElement, bool kStochastic, DType kOf>
__device__ void StoreRow(const ActivationParams& p, const ActivationPlace& at, int i,
                         const Eight<kOf> (&x)[ActivationShared::kParts]) {
  using Magnitude = Magnitudes<kOf>;
  const int64_t blocks = p.columns / kBlock, line = at.line(i);
  const uint32_t gate = LargestOf<kOf>(x[ActivationShared::kGate]);
  const uint32_t up = LargestOf<kOf>(x[ActivationShared::kUp]);
  const uint32_t both = Magnitude::Larger(Permute(gate, up, 0x5410), Permute(gate, up, 0x7632));
  const uint32_t shared = Magnitude::template Share<1, 16>(both);
  JGG_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float scale = MakeScale<kElement>(Magnitude::Value(shared, half), false);
    const int64_t column = half * p.columns + at.column();
    const uint2 codes =
        EncodeRow<kElement, kStochastic, kOf>(p.by_rows, x[half], scale, line, column);
    if (!at.exists(i)) continue;
    *reinterpret_cast<uint2*>(p.by_rows.codes + 2 * line * p.columns + column) = codes;
    if (at.lane == half) p.by_rows.scales[(2 * line + half) * blocks + at.tile] = scale;
  }
}

// All of a thread's rows; `largest`: of each part's columns.
template <Element kElement, bool kStochastic, DType kOf, Activation kActivation>
__device__ void StoreRows(const ActivationParams& p, const ActivationPlace& at,
                          ActivationShared& shared,
                          uint32_t (&largest)[ActivationShared::kParts][4]) {
  using Magnitude = Magnitudes<kOf>;
  JGG_NO_UNROLL
  for (int i = 0; i < 8; ++i) {
    Eight<kOf> x[ActivationShared::kParts];
    JGG_UNROLL
    for (int part = 0; part < ActivationShared::kParts; ++part) {
      x[part] = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
    }
    const float scale = at.exists(i) ? __ldg(p.row_scale + at.line(i)) : 0.0f;
    float sum = DifferentiateEight<kOf, kActivation>(x, scale);
    JGG_UNROLL
    for (int mask = 1; mask < 16; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (at.lane == 0 && at.exists(i)) p.sums[at.tile * p.rows + at.line(i)] = sum;
    StoreRow<kElement, kStochastic, kOf>(p, at, i, x);
    JGG_UNROLL
    for (int part = 0; part < ActivationShared::kParts; ++part) {
      shared.elements[part][at.row + i][at.lane] = FourOf<kOf>(x[part]);
      JGG_UNROLL
      for (int word = 0; word < 4; ++word) {
        const uint32_t magnitude = Magnitude::Of(x[part].words[word]);
        largest[part][word] = Magnitude::Larger(largest[part][word], magnitude);
      }
    }
  }
}

// Scales of blocks along rows: to shared memory, and to the results.
template <Element kElement, DType kOf>
__device__ void ScalesAlongRows(const ActivationParams& p, const ActivationPlace& at,
                                ActivationShared& shared,
                                uint32_t (&largest)[ActivationShared::kParts][4]) {
  using Magnitude = Magnitudes<kOf>;
  const int warp = threadIdx.x / 32;
  JGG_UNROLL
  for (int part = 0; part < ActivationShared::kParts; ++part) {
    JGG_UNROLL
    for (uint32_t& word : largest[part]) word = Magnitude::template Share<16, 32>(word);
    if (threadIdx.x % 32 < 16) {
      shared.largest[part][warp][at.lane] =
          make_uint4(largest[part][0], largest[part][1], largest[part][2], largest[part][3]);
    }
  }
  __syncthreads();
  JGG_NO_UNROLL
  for (int i = threadIdx.x; i < ActivationShared::kParts * kBlock; i += kActivationThreads) {
    const int part = i / kBlock, column = i % kBlock;
    uint32_t all = 0;
    JGG_UNROLL
    for (int j = 0; j < kActivationWarps; ++j) {
      const auto* words = reinterpret_cast<const uint32_t*>(shared.largest[part][j]);
      all = Magnitude::Larger(all, words[column / 2]);
    }
    const float scale = MakeScale<kElement>(Magnitude::Value(all, column % 2), false);
    shared.scales[part][column] = {scale, MakeDivisor(scale).reciprocal};
    const QuantizeParams& to = part == ActivationShared::kActivated ? p.activated : p.by_columns;
    const int64_t line =
        (part == ActivationShared::kUp ? p.columns : 0) + kBlock * at.tile + column;
    to.scales[line * to.blocks + at.tile_of_rows] = scale;
  }
  __syncthreads();
}

// Codes of a part in blocks along rows, transposed: to lines from `first` on.
template <Element kElement, bool kStochastic, DType kOf>
__device__ void StoreColumns(const QuantizeParams& to, const ActivationPlace& at,
                             ActivationShared& shared, int part, int64_t first) {
  const int span = at.lane / 8, thread = at.row + at.lane % 8;  // of a span
  const int64_t along = kBlock * at.tile_of_rows;
  Patch<kOf> x;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
  __syncthreads();  // codes take the elements' place
  const SharedScale* scales = shared.scales[part] + 8 * at.lane;
  TransposedCodes& codes = shared.codes(part)[span];
  EncodeColumns<kElement, kStochastic, kOf>(
      to, x, first + 8 * at.lane, along + at.row, [&](int i) { return scales[i]; },
      [&](int i, uint2 eight) { codes.Put(thread, i, eight); });
  __syncthreads();
  codes.Write(to, thread, first + kSpan * span, kSpan, along);
}

// F is a multiple of 128.
template <DType kOf, Activation kActivation, bool kStochastic>
__global__ void __launch_bounds__(kActivationThreads, 2)
    ActivationBackwardKernel(const __grid_constant__ ActivationParams p) {
  constexpr Element kElement = Element::kE4M3;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ActivationShared*>(memory);
  const ActivationPlace at(p);
  if (at.rows.count == 0) return;  // of no group: nobody reads it
  CopyElements<kOf>(p, at, shared);
  uint32_t largest[ActivationShared::kParts][4] = {};
  StoreRows<kElement, kStochastic, kOf, kActivation>(p, at, shared, largest);
  ScalesAlongRows<kElement, kOf>(p, at, shared, largest);
  const int64_t first = kBlock * at.tile;
  StoreColumns<kElement, kStochastic, kOf>(p.by_columns, at, shared, ActivationShared::kGate,
                                           first);
  StoreColumns<kElement, kStochastic, kOf>(p.by_columns, at, shared, ActivationShared::kUp,
                                           p.columns + first);
  StoreColumns<kElement, false, kOf>(p.activated, at, shared, ActivationShared::kActivated, first);
}

}  // namespace jgg::fp8::device

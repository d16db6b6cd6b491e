// Gated activations beside FP8's quantizer: the codes of activation(h), and those of its backward
// pass. No array of h's dtype is ever stored of either. h (R, 2F) has the gate in its first half.
#pragma once

#include "fp8/device/quantize_tiles.cuh"
#include "grouped_mm/device/activation.cuh"

namespace jgg::fp8::device {

using jgg::device::Differentiate;
using jgg::device::LargerMagnitude2;
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
template <bool kSplit>
struct ActivationShared {
  enum Part { kGate, kUp, kActivated, kParts };
  // h and d as they are stored, then the values to quantize, then their codes: see Piece.
  uint4 elements[kParts][kBlock][kBlock / 8];
  uint4 largest[kParts][kActivationWarps][kBlock / 8];
  // Scales of columns, in the order in which neighbouring lanes read them, and of a row's halves.
  SharedScale<kSplit> columns[kParts][4][kBlock / 8][2];
  SharedScale<kSplit> rows[kBlock][2];

  // The codes of a warp's sixteen rows take the place of its own elements: 16 bytes of column i of
  // a lane's eight. Half of the lanes swap the two halves. So neither writes nor reads have bank
  // conflicts.
  __device__ uint2* Piece(int part, int warp, int lane, int i) {
    uint4* own = elements[part][16 * warp];
    return reinterpret_cast<uint2*>(own + lane / 8 * 64 + i * 8 + (lane % 8 ^ warp));
  }
};

struct ActivationPlace {
  TileRows rows;          // of h
  uint32_t across;        // tiles beside each other
  uint32_t tile_of_rows;  // padded
  uint32_t tile;          // of 128 columns of F
  int lane, row;          // of a row; first of eight

  __device__ explicit ActivationPlace(const ActivationParams& p)
      : across(static_cast<uint32_t>(p.columns) / kBlock),
        lane(threadIdx.x % 16),
        row(threadIdx.x / 16 * 8) {
    tile_of_rows = blockIdx.x / across;
    tile = blockIdx.x % across;
    rows = p.groups[tile_of_rows];
  }

  __device__ bool exists(int i) const { return row + i < rows.count; }
  __device__ uint32_t line(int i) const { return rows.first + row + i; }
  __device__ uint32_t column() const { return kBlock * tile + 8 * lane; }
};

// Where row i is, `first` being the one of 0.
template <typename T>
__device__ T* RowOf(T* first, uint32_t pitch, uint32_t i) {
  return first + uint64_t{pitch} * i;
}

__device__ inline void CopyOrZero(uint4& to, const uint8_t* from, bool exists) {
#ifdef __CUDA_ARCH__
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
#else
  to = exists ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
#endif
}

__device__ inline void CommitCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kRunning>
__device__ void WaitForCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kRunning) : "memory");
#endif
}

// A thread's own elements of h and d, in two groups of four rows.
template <DType kOf, typename Shared>
__device__ void CopyElements(const ActivationParams& p, const ActivationPlace& at, Shared& shared) {
  const auto pitch = static_cast<uint32_t>(p.columns) * kElementBytes<kOf>;
  const uint32_t column = at.column() * kElementBytes<kOf>;
  const uint8_t* gate = RowOf(p.h + column, 2 * pitch, at.line(0));
  const uint8_t* up = gate + pitch;
  const uint8_t* d = RowOf(p.d + column, pitch, at.line(0));
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool exists = at.exists(i);
    const auto to = [&](int part) -> uint4& { return shared.elements[part][at.row + i][at.lane]; };
    CopyOrZero(to(Shared::kGate), RowOf(gate, 2 * pitch, i), exists);
    CopyOrZero(to(Shared::kUp), RowOf(up, 2 * pitch, i), exists);
    CopyOrZero(to(Shared::kActivated), RowOf(d, pitch, i), exists);
    if (i % 4 == 3) CommitCopies();
  }
}

template <DType kOf>
__device__ Eight<kOf> EightOf(const uint4& four) {
  return {four.x, four.y, four.z, four.w};
}

// Writes to shared memory at this point. Later, the compiler would copy words to neighbouring
// registers first.
__device__ inline void Store4(uint4& to, const uint32_t (&words)[4]) {
#ifdef __CUDA_ARCH__
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#else
  to = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// Makes the values to quantize of eight stored elements of a row. Returns their sum of d *
// activation(h).
template <DType kOf, Activation kActivation>
__device__ float DifferentiateEight(Eight<kOf> (&x)[3], float scale) {
  auto &gate = x[0], &up = x[1], &d = x[2];  // as of ActivationShared
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

// The largest magnitude of pairs, with any signs.
template <DType kOf>
__device__ uint32_t AnySign(const Eight<kOf>& x) {
  return LargerMagnitude2<kOf>(LargerMagnitude2<kOf>(x.words[0], x.words[1]),
                               LargerMagnitude2<kOf>(x.words[2], x.words[3]));
}

// Two lanes exchange values. The even lane then has those of one row, the odd lane the other's.
template <typename T, typename Function>
__device__ T OfPair(T even, T odd, bool is_odd, Function function) {
  const T give = is_odd ? even : odd;
  return function(is_odd ? odd : even, __shfl_xor_sync(0xffffffffu, give, 1));
}

// Makes the values to quantize of all rows of a thread, and the sums and scales of rows. `largest`
// gets the largest of each part's columns. Returns whether a row's block is dead.
template <Element kElement, DType kOf, Activation kActivation, bool kSplit>
__device__ bool DifferentiateRows(const ActivationParams& p, const ActivationPlace& at,
                                  ActivationShared<kSplit>& shared, uint32_t (&largest)[3][4]) {
  using Magnitude = Magnitudes<kOf>;
  using Shared = ActivationShared<kSplit>;
  // After the reduction a lane has row lane % 8, of the half lane / 8 of dh.
  const int own = at.lane % 8, half = at.lane / 8;
  const bool exists = at.exists(own), odd = at.lane % 2;
  const float own_scale = exists ? __ldg(p.row_scale + at.line(own)) : 0.0f;
  float own_sum = 0.0f;
  uint32_t own_largest = 0;
  WaitForCopies<1>();
  JGG_NO_UNROLL
  for (int two = 0; two < 4; ++two) {
    if (two == 2) WaitForCopies<0>();
    float sums[2];
    uint32_t of_rows[2];  // the largest of both halves
    JGG_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int row = 2 * two + j;
      Eight<kOf> x[Shared::kParts];
      JGG_UNROLL
      for (int part = 0; part < Shared::kParts; ++part) {
        x[part] = EightOf<kOf>(shared.elements[part][at.row + row][at.lane]);
      }
      const int from = static_cast<int>(threadIdx.x % 32 / 16 * 16) + row;
      const float scale = __shfl_sync(0xffffffffu, own_scale, from);
      sums[j] = DifferentiateEight<kOf, kActivation>(x, scale);
      JGG_UNROLL
      for (int part = 0; part < Shared::kParts; ++part) {
        Store4(shared.elements[part][at.row + row][at.lane], x[part].words);
      }
      const uint32_t gate = AnySign<kOf>(x[Shared::kGate]), up = AnySign<kOf>(x[Shared::kUp]);
      of_rows[j] = LargerMagnitude2<kOf>(Permute(gate, up, 0x5410), Permute(gate, up, 0x7632));
      JGG_UNROLL
      for (int part = 0; part < Shared::kParts; ++part) {
        JGG_UNROLL
        for (int word = 0; word < 4; ++word) {
          uint32_t& so_far = largest[part][word];
          so_far = LargerMagnitude2<kOf>(so_far, x[part].words[word]);
        }
      }
    }
    const auto add = [](float a, float b) { return a + b; };
    float sum = OfPair(sums[0], sums[1], odd, add);
    JGG_UNROLL
    for (int mask = 2; mask < 16; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    uint32_t both = OfPair(of_rows[0], of_rows[1], odd, LargerMagnitude2<kOf>);
    both = Magnitude::template Share<2, 16>(Magnitude::Of(both));
    if (two == own / 2) {
      own_sum = sum;
      own_largest = both;
    }
  }
  const float scale = MakeScale<kElement>(Magnitude::Value(own_largest, half), false);
  shared.rows[at.row + own][half] = SharedScale<kSplit>::Of(scale);
  if (exists) {
    const uint32_t line = at.line(own);
    if (half == 0) RowOf(p.sums + line, static_cast<uint32_t>(p.rows), at.tile)[0] = own_sum;
    RowOf(p.by_rows.scales + at.tile, at.across, 2 * line + half)[0] = scale;
  }
  return IsDead(scale);
}

// Writes scales of blocks along rows to shared memory and to the results. Takes whether one of this
// thread's blocks is dead, and returns whether any block is.
template <Element kElement, DType kOf, bool kSplit>
__device__ bool ScalesAlongRows(const ActivationParams& p, const ActivationPlace& at,
                                ActivationShared<kSplit>& shared, uint32_t (&largest)[3][4],
                                bool dead) {
  using Magnitude = Magnitudes<kOf>;
  using Shared = ActivationShared<kSplit>;
  const int warp = threadIdx.x / 32;
  JGG_UNROLL
  for (int part = 0; part < Shared::kParts; ++part) {
    JGG_UNROLL
    for (uint32_t& word : largest[part]) {
      word = Magnitude::template Share<16, 32>(Magnitude::Of(word));
    }
    if (threadIdx.x % 32 < 16) {
      shared.largest[part][warp][at.lane] =
          make_uint4(largest[part][0], largest[part][1], largest[part][2], largest[part][3]);
    }
  }
  __syncthreads();
  constexpr int kPairs = kBlock / 2;  // of columns
  if (threadIdx.x < Shared::kParts * kPairs) {
    const int part = threadIdx.x / kPairs, pair = threadIdx.x % kPairs;
    uint32_t all = 0;
    JGG_UNROLL
    for (int j = 0; j < kActivationWarps; ++j) {
      all =
          Magnitude::Larger(all, reinterpret_cast<const uint32_t*>(shared.largest[part][j])[pair]);
    }
    const QuantizeParams& to = part == Shared::kActivated ? p.activated : p.by_columns;
    const auto blocks = static_cast<uint32_t>(to.blocks);
    const uint32_t line = kBlock * (at.tile + (part == Shared::kUp ? at.across : 0)) + 2 * pair;
    float* scales = RowOf(to.scales + at.tile_of_rows, blocks, line);
    JGG_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float scale = MakeScale<kElement>(Magnitude::Value(all, j), false);
      shared.columns[part][pair % 4][pair / 4][j] = SharedScale<kSplit>::Of(scale);
      scales[j * blocks] = scale;
      dead = dead || IsDead(scale);
    }
  }
  return __syncthreads_or(dead);
}

// Where the codes of a thread's rows of a half of dh go.
struct RowCodes {
  uint8_t* first;
  uint32_t pitch;

  __device__ RowCodes(const ActivationParams& p, const ActivationPlace& at, int half)
      : pitch(static_cast<uint32_t>(2 * p.columns)) {
    first = RowOf(p.by_rows.codes + half * p.columns + at.column(), pitch, at.line(0));
  }

  __device__ void Put(const ActivationPlace& at, int i, uint2 codes) const {
    if (at.exists(i)) *reinterpret_cast<uint2*>(RowOf(first, pitch, i)) = codes;
  }
};

// Where the codes of a column of a thread's rows go.
struct ColumnCodes {
  uint2* first;

  template <typename Shared>
  __device__ ColumnCodes(const ActivationPlace& at, Shared& shared, int part) {
    const int exchanged = (at.row / 8 ^ at.lane / 8) % 2;
    first = shared.Piece(part, threadIdx.x / 32, at.lane, 0) + exchanged;
  }

  __device__ void operator()(int i, uint2 codes) const { first[2 * 8 * i] = codes; }
};

// Codes of a part in blocks along rows, to shared memory, and those of dh in blocks along columns,
// to the result. `dead`: a block of the tile is.
template <Element kElement, DType kOf, bool kRows>
__device__ void EncodePart(const ActivationParams& p, const ActivationPlace& at,
                           ActivationShared<true>& shared, int part, bool dead) {
  Patch<kOf> x;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
  SplitReciprocal rows[8];
  if constexpr (kRows) {
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) rows[i] = shared.rows[at.row + i][part];
  }
  __syncwarp();  // codes take the elements' place
  const ColumnCodes put(at, shared, part);
  uint32_t of_rows[8][2], of_columns[4][2];
  JGG_UNROLL
  for (int right = 0; right < 2; ++right) {  // four columns
    SplitReciprocal columns[4];
    JGG_UNROLL
    for (int j = 0; j < 4; ++j)
      columns[j] = shared.columns[part][2 * right + j / 2][at.lane][j % 2];
    JGG_UNROLL
    for (int lower = 0; lower < 2; ++lower) {  // four rows
      float values[4][4];
      JGG_UNROLL
      for (int i = 0; i < 4; ++i) {
        JGG_UNROLL
        for (int j = 0; j < 4; ++j) values[i][j] = x[4 * lower + i][4 * right + j];
        if constexpr (kRows) {
          of_rows[4 * lower + i][right] = EncodeSplit4<kElement>(values[i], rows[4 * lower + i]);
        }
      }
      JGG_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float four[4] = {values[0][j], values[1][j], values[2][j], values[3][j]};
        of_columns[j][lower] = EncodeSplit4<kElement>(four, columns[j]);
      }
    }
    JGG_UNROLL
    for (int j = 0; j < 4; ++j) {
      put(4 * right + j, make_uint2(of_columns[j][0], of_columns[j][1]));
    }
  }
  if constexpr (kRows) {
    RowCodes to(p, at, part);
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (at.exists(i))
        *reinterpret_cast<uint2*>(to.first) = make_uint2(of_rows[i][0], of_rows[i][1]);
      to.first += to.pitch;
    }
  }
  if (jgg::device::AnyLane(dead)) {  // what was put there is put right
    JGG_NO_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (IsDead(shared.columns[part][i / 2][at.lane][i % 2].high)) put(i, uint2{});
      if (kRows && IsDead(shared.rows[at.row + i][part].high)) {
        RowCodes(p, at, part).Put(at, i, uint2{});
      }
    }
  }
}

// The same with numbers at random.
template <Element kElement, bool kStochastic, DType kOf, bool kRows>
__device__ void EncodePart(const ActivationParams& p, const ActivationPlace& at,
                           ActivationShared<false>& shared, int part) {
  if constexpr (kRows) {
    const int64_t column = part * p.columns + at.column();
    const RowCodes to(p, at, part);
    JGG_NO_UNROLL
    for (int i = 0; i < 8; ++i) {
      const auto of = shared.rows[at.row + i][part];
      const auto x = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
      float values[8];
      JGG_UNROLL
      for (int j = 0; j < 8; ++j) values[j] = x[j];
      to.Put(at, i,
             EncodeEight<kElement, kStochastic>(p.by_rows, values, of.value, of.reciprocal,
                                                jgg::device::AnyLane(IsSmall(of.value)),
                                                RandomOfLine(p.by_rows, at.line(i)), column));
    }
  }
  Patch<kOf> x;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = EightOf<kOf>(shared.elements[part][at.row + i][at.lane]);
  __syncwarp();  // codes take the elements' place
  const QuantizeParams& to = kRows ? p.by_columns : p.activated;
  const int64_t line = (kRows ? part * p.columns : 0) + at.column();
  EncodeColumns<kElement, kStochastic, kOf, false>(
      to, x, line, kBlock * at.tile_of_rows + at.row,
      [&](int i) { return shared.columns[part][i / 2][at.lane][i % 2]; },
      ColumnCodes(at, shared, part));
}

// The codes of columns of a part, transposed: to lines from `first` on. Eight threads have a line.
template <typename Shared>
__device__ void WriteColumns(const QuantizeParams& to, const ActivationPlace& at, Shared& shared,
                             int part, uint32_t first) {
  const int piece = threadIdx.x % 8, lane = threadIdx.x / 8 % 2 * 8 + threadIdx.x / 16 % 8;
  const int odd = threadIdx.x / 128, exchanged = lane / 8;
  const auto along = static_cast<uint32_t>(to.along);
  const uint2* from = shared.Piece(part, piece, lane, odd);
  uint8_t* line =
      RowOf(to.codes + kBlock * at.tile_of_rows + 16 * piece, along, first + 8 * lane + odd);
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint2 upper = from[32 * i + exchanged], lower = from[32 * i + 1 - exchanged];
    *reinterpret_cast<uint4*>(RowOf(line, 2 * along, i)) =
        make_uint4(upper.x, upper.y, lower.x, lower.y);
  }
}

// F is a multiple of 128.
template <DType kOf, Activation kActivation, bool kStochastic>
__global__ void __launch_bounds__(kActivationThreads, 2)
    ActivationBackwardKernel(const __grid_constant__ ActivationParams p) {
  constexpr Element kElement = Element::kE4M3;
  constexpr bool kSplit = kSplits<kOf, kStochastic>;
  using Shared = ActivationShared<kSplit>;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const ActivationPlace at(p);
  if (at.rows.count == 0) return;  // of no group: nobody reads it
  CopyElements<kOf>(p, at, shared);
  uint32_t largest[Shared::kParts][4] = {};
  bool dead = DifferentiateRows<kElement, kOf, kActivation>(p, at, shared, largest);
  dead = ScalesAlongRows<kElement, kOf>(p, at, shared, largest, dead);
  if constexpr (kSplit) {
    JGG_NO_UNROLL
    for (int part = 0; part < Shared::kActivated; ++part) {
      EncodePart<kElement, kOf, true>(p, at, shared, part, dead);
    }
    EncodePart<kElement, kOf, false>(p, at, shared, Shared::kActivated, dead);
  } else {
    JGG_NO_UNROLL
    for (int part = 0; part < Shared::kActivated; ++part) {
      EncodePart<kElement, kStochastic, kOf, true>(p, at, shared, part);
    }
    EncodePart<kElement, false, kOf, false>(p, at, shared, Shared::kActivated);
  }
  __syncthreads();
  const uint32_t first = kBlock * at.tile;
  WriteColumns(p.by_columns, at, shared, Shared::kGate, first);
  WriteColumns(p.by_columns, at, shared, Shared::kUp, kBlock * at.across + first);
  WriteColumns(p.activated, at, shared, Shared::kActivated, first);
}

}  // namespace jgg::fp8::device

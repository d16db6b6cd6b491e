// The kernels of matrices with one scale each: x (M, R, C), R may be grouped where M is 1.
//   CastKernel     a scale that is known -> codes as x is stored, codes transposed, or both, from
//   one
//                  read of x; and the largest magnitudes, for the scale of the next step
//   LargestKernel  the largest magnitudes alone, of which a scale is made
//   CodesKernel    codes that are there, in another order: lines by list, as they are and
//   transposed
// A scale is the same along both axes, so the codes are, and are made once.
#pragma once

#include "fp8/device/quantize_both.cuh"

namespace jgg::fp8::device {

struct CastParams {
  QuantizeParams of;   // its codes, stored as x is, may be null
  uint8_t* turned;     // (M, C, along), or null
  const float* known;  // a scale for each matrix; codes of one with NaN are zeros
  uint2* largest;      // (M, gridDim.x), or null
  // LargestKernel: where this is 0 nobody asks, and largest are zeros; or null.
  const int32_t* wanted;
};

// Bits of two magnitudes: the largest, which is NaN if there is one, and the largest finite one.
struct LargestPair {
  uint32_t all = 0, finite = 0;

  template <DType kOf>
  __device__ void Add(const Eight<kOf>& x, uint32_t largest) {
    const uint32_t bits = AsBits(Magnitudes<kOf>::Largest(largest));
    all = max(all, bits);
    if (bits < jgg::device::kInfinity) {
      finite = max(finite, bits);
      return;
    }
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t one = AsBits(fabsf(x[i]));
      if (one < jgg::device::kInfinity) finite = max(finite, one);
    }
  }

  // All threads' largest, in thread 0. There NaN has one pattern.
  template <int kThreads>
  __device__ void Share(uint2 (&shared)[kThreads / 32]) {
    const uint2 own =
        make_uint2(__reduce_max_sync(0xffffffffu, all), __reduce_max_sync(0xffffffffu, finite));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    JGG_UNROLL
    for (int i = 0; i < kThreads / 32; ++i) {
      all = max(all, shared[i].x);
      finite = max(finite, shared[i].y);
    }
    if (all > jgg::device::kInfinity) all = 0x7fc00000;
  }
};

// The codes of four quotients, rounded to nearest. A known scale may be too small: then quotients
// are cut at the largest code. NaN has one code.
template <Element kElement>
JGG_HOST_DEVICE uint32_t SaturatedCodes4(const float (&q)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return NearestCodes4<kElement>(q);
#else
  constexpr float kLargest = Format<kElement>::kLargest;
  uint32_t four = 0;
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = NearestCode<kElement>(fminf(fabsf(q[i]), kLargest)) & 0x7f;
    const uint32_t with_sign = code | AsBits(q[i]) >> 31 << 7;
    four |= (q[i] != q[i] ? 0x7f : with_sign) << (8 * i);
  }
  return four;
#endif
}

// The codes of eight elements. An infinity times `low`, which is 0 where the scale is a power of
// two, is NaN.
template <Element kElement, DType kOf>
__device__ uint2 CastEight(const Eight<kOf>& x, const SplitReciprocal& by) {
  uint32_t words[2];
  JGG_UNROLL
  for (int word = 0; word < 2; ++word) {
    float q[4];
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float value = x[4 * word + i];
      q[i] = jgg::device::MultiplyAdd(value, by.high, Multiply(value, by.low));
    }
    words[word] = SaturatedCodes4<kElement>(q);
  }
  return IsDead(by.high) ? make_uint2(0, 0) : make_uint2(words[0], words[1]);
}

// Where a thread block is: 128 columns of 128 rows, or of padded rows where those are grouped and
// codes are transposed. Where rows come by list, thread blocks of all rows take a slice of columns
// before those of the next slice.
struct CastPlace {
  int64_t tile, block;
  TileRows rows;    // of x
  int part, eight;  // eight columns, and eight rows, of those

  __device__ explicit CastPlace(const QuantizeParams& p)
      : part(threadIdx.x % kAcross), eight(threadIdx.x / kAcross) {
    const auto across = static_cast<uint32_t>(CeilDiv(p.columns, kBlock));
    uint32_t first = 0, count = across, rest = blockIdx.x;
    if (p.list != nullptr) {
      const uint32_t of_slice = p.slice * (gridDim.x / across);
      first = rest / of_slice * p.slice;
      rest %= of_slice;
      count = min(p.slice, across - first);
    }
    tile = rest / count;
    block = first + rest % count;
    if (p.groups != nullptr) {
      rows = p.groups[tile];
    } else {
      const int64_t inside = p.inside == nullptr ? p.rows : min(int64_t{*p.inside}, p.rows);
      const int64_t left = max(inside - kBlock * tile, int64_t{0});
      rows = {static_cast<int32_t>(kBlock * tile),
              static_cast<int32_t>(min(int64_t{kBlock}, left))};
    }
  }

  __device__ int64_t column() const { return kBlock * block + 8 * part; }
};

// Rows of no group become zeros, of which each tile has 128.
__device__ inline void ClearRest(const QuantizeParams& p, const CastPlace& at) {
  const int64_t begin = *p.inside + kBlock * at.tile, end = min(begin + kBlock, p.rows);
  if (at.column() >= p.columns) return;
  JGG_NO_UNROLL
  for (int64_t row = begin + at.eight; row < end; row += kSquareThreads / kAcross) {
    *reinterpret_cast<uint2*>(p.codes + row * p.columns + at.column()) = make_uint2(0, 0);
  }
}

// Codes of a thread's eight rows and eight columns, of matrix m, of which `count` rows exist. They
// leave as x is stored, and go to `turned`.
__device__ inline void PutCodes(const CastParams& cast, const CastPlace& at, int64_t m, int count,
                                const uint2 (&codes)[8], TurnedBlock& turned) {
  const QuantizeParams& p = cast.of;
  const int odd = at.part % 2;
  if (p.codes != nullptr) {
    const int64_t row = m * p.rows + at.rows.first + 8 * at.eight;
    uint8_t* to = p.codes + row * p.columns + at.column() + (odd ? p.columns - 8 : 0);
    JGG_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const uint4 sixteen = SixteenOfRow(codes[i], codes[i + 1], odd);
      if (i + odd < count) *reinterpret_cast<uint4*>(to) = sixteen;
      to += 2 * p.columns;
    }
  }
  if (cast.turned != nullptr) turned.Put(at.part, at.eight, codes);
}

// Those of all threads, transposed, after they have met.
__device__ inline void WriteTurned(const CastParams& cast, const CastPlace& at, int64_t m,
                                   const TurnedBlock& turned) {
  const QuantizeParams& p = cast.of;
  if (cast.turned == nullptr) return;
  const int64_t line = m * p.columns + kBlock * at.block, along = kBlock * at.tile;
  turned.Write(cast.turned + line * p.along + along, p.along, p.columns - kBlock * at.block,
               p.along - along);
}

template <DType kOf, Element kElement>
__global__ void __launch_bounds__(kSquareThreads, kOf == DType::kF32 ? 2 : 4)
    CastKernel(const __grid_constant__ CastParams cast) {
  __shared__ TurnedBlock turned;
  __shared__ uint2 shared[kSquareThreads / 32];
  const QuantizeParams& p = cast.of;
  const CastPlace at(p);
  const bool inside = at.column() < p.columns;
  const int count = inside ? at.rows.count - 8 * at.eight : 0;
  if (p.codes != nullptr && p.inside != nullptr) ClearRest(p, at);
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    if (m != blockIdx.y) __syncthreads();  // shared memory is read
    const int64_t row = m * p.rows + at.rows.first + 8 * at.eight;
    const int64_t pitch = p.columns * kElementBytes<kOf>;
    const uint8_t* from = p.x + at.column() * kElementBytes<kOf>;
    Patch<kOf> x;
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (p.list == nullptr) {
        x[i] = LoadEight<kOf>(from + (row + i) * pitch, i < count);
      } else {
        const int64_t line = i < count ? __ldg(p.list + row + i) : -1;
        x[i] = LoadEight<kOf>(from + line * pitch, line >= 0 && line < p.x_lines);
      }
    }
    const SplitReciprocal by = MakeSplitReciprocal(__ldg(cast.known + m));
    LargestPair largest;
    uint2 codes[8];
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (cast.largest != nullptr) largest.Add<kOf>(x[i], LargestOf<kOf>(x[i]));
      codes[i] = CastEight<kElement, kOf>(x[i], by);
    }
    PutCodes(cast, at, m, count, codes, turned);
    if (cast.largest != nullptr) {
      largest.Share<kSquareThreads>(shared);
      if (threadIdx.x == 0) {
        cast.largest[m * gridDim.x + blockIdx.x] = make_uint2(largest.all, largest.finite);
      }
    } else if (cast.turned != nullptr) {
      __syncthreads();
    }
    WriteTurned(cast, at, m, turned);
  }
}

// x are codes, of one matrix. Rows of no group are left as they are.
template <typename = void>
__global__ void __launch_bounds__(kSquareThreads, 6)
    CodesKernel(const __grid_constant__ CastParams cast) {
  __shared__ TurnedBlock turned;
  const QuantizeParams& p = cast.of;
  const CastPlace at(p);
  const int count = at.column() < p.columns ? at.rows.count - 8 * at.eight : 0;
  const int64_t row = at.rows.first + 8 * at.eight;
  int64_t lines[8];
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    lines[i] = i < count ? (p.list == nullptr ? row + i : __ldg(p.list + row + i)) : -1;
  }
  uint2 codes[8];
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool exists = lines[i] >= 0 && lines[i] < p.x_lines;
    const auto* from = reinterpret_cast<const uint2*>(p.x + lines[i] * p.columns + at.column());
    codes[i] = exists ? __ldg(from) : make_uint2(0, 0);
  }
  PutCodes(cast, at, 0, count, codes, turned);
  if (cast.turned != nullptr) __syncthreads();
  WriteTurned(cast, at, 0, turned);
}

// Thread blocks for a matrix, of `tiles` times 128 rows.
inline int64_t CastBlocks(int64_t tiles, int64_t columns) {
  return tiles * CeilDiv(columns, kBlock);
}

inline constexpr int kLargestThreads = 256, kLargestSteps = 8;

// cast.largest alone. A thread has eight neighbouring elements, and as many more as are behind
// those of all thread blocks.
template <DType kOf>
__global__ void __launch_bounds__(kLargestThreads)
    LargestKernel(const __grid_constant__ CastParams cast) {
  __shared__ uint2 shared[kLargestThreads / 32];
  const QuantizeParams& p = cast.of;
  int64_t rows = p.inside == nullptr ? p.rows : min(int64_t{*p.inside}, p.rows);
  if (cast.wanted != nullptr && *cast.wanted == 0) rows = 0;
  const int64_t pieces = rows * p.columns / 8, step = int64_t{gridDim.x} * kLargestThreads;
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    if (m != blockIdx.y) __syncthreads();  // shared memory is read
    const uint8_t* from = p.x + m * p.rows * p.columns * kElementBytes<kOf>;
    LargestPair largest;
    JGG_NO_UNROLL
    for (int64_t first = blockIdx.x * kLargestThreads + threadIdx.x; first < pieces;
         first += kLargestSteps * step) {
      Patch<kOf> x;
      JGG_UNROLL
      for (int i = 0; i < kLargestSteps; ++i) {
        const int64_t piece = first + i * step;
        x[i] = LoadEight<kOf>(from + piece * (8 * kElementBytes<kOf>), piece < pieces);
      }
      JGG_UNROLL
      for (int i = 0; i < kLargestSteps; ++i) largest.Add<kOf>(x[i], LargestOf<kOf>(x[i]));
    }
    largest.Share<kLargestThreads>(shared);
    if (threadIdx.x == 0) {
      cast.largest[m * gridDim.x + blockIdx.x] = make_uint2(largest.all, largest.finite);
    }
  }
}

}  // namespace jgg::fp8::device

// The kernels of nvfp4_quantize: x (M, R, C) to codes and scales, in blocks of 16 along C; R may be
// grouped. First the largest magnitude of each matrix, then every block on its own.
// quantize_columns.cuh has blocks along R, quantize_block.cuh the arithmetic.
#pragma once

#include "nvfp4/device/quantize_block.cuh"
#include "nvfp4/device/starts.cuh"

namespace jgg::nvfp4::device {

inline constexpr int kQuantizeThreads = 256;
inline constexpr int kTileLines = 64;  // rows that a warp quantizes along: groups are padded so

struct QuantizeParams {
  const uint8_t* x;
  int64_t matrices, rows, columns;
  int64_t blocks;                 // to a line of the result
  const int32_t *starts, *tiles;  // (G + 1,): each group's first row, and its first 64 padded rows
  int32_t groups;                 // 0 where rows are not grouped
  const uint32_t* seed;           // two words
  uint32_t* amax;                 // (M,), bits
  const MatrixScales* matrix_scales;
  uint8_t *weight, *scales;

  __device__ int64_t rows_inside() const { return groups == 0 ? rows : starts[groups]; }
};

// The second read of x begins at the end of x, which the first read may have left in the L2 cache.
template <typename Integer>
__device__ Integer FromLast(Integer at, Integer count) {
  return count - 1 - at;
}

template <DType kOf>
inline constexpr int kElementBytes = Size(kOf);

// ---- once per call ----

// From group sizes to starts and tiles, and amax to 0: one block.
static __global__ void __launch_bounds__(kScanThreads)
    StartsKernel(const int32_t* sizes, int32_t groups, int32_t rows, int32_t* starts,
                 int32_t* tiles, uint32_t* amax) {
  if (threadIdx.x == 0) *amax = 0;
  FindStarts({sizes, groups, rows, kTileLines, 0}, starts, tiles);
}

static __global__ void __launch_bounds__(kQuantizeThreads)
    MatrixScalesKernel(const uint32_t* amax, int64_t matrices, MatrixScales* scales,
                       float* global_scale) {
  const int64_t m = int64_t{blockIdx.x} * kQuantizeThreads + threadIdx.x;
  if (m >= matrices) return;
  scales[m] = MakeMatrixScales(amax[m]);
  global_scale[m] = GlobalScale(amax[m]);
}

// ---- the largest finite magnitude ----

// All threads of a block call it, each with its own bits.
__device__ inline void JoinAmax(uint32_t bits, uint32_t* amax) {
  __shared__ uint32_t joined;
  if (threadIdx.x == 0) joined = 0;
  __syncthreads();
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) atomicMax(&joined, bits);
  __syncthreads();
  if (threadIdx.x == 0 && joined != 0) atomicMax(amax, joined);
  __syncthreads();  // before the next matrix
}

template <DType kOf>
__global__ void __launch_bounds__(kQuantizeThreads)
    AmaxKernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kCount = 16 / kElementBytes<kOf>, kAtOnce = 4;
  const int64_t step = int64_t{gridDim.x} * kQuantizeThreads;
  const int64_t thread = int64_t{blockIdx.x} * kQuantizeThreads + threadIdx.x;
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    const int64_t elements = p.rows_inside() * p.columns, vectors = elements / kCount;
    const uint8_t* x = p.x + m * p.rows * p.columns * kElementBytes<kOf>;
    uint32_t largest = 0;
    for (int64_t i = thread; i < vectors; i += kAtOnce * step) {
      uint4 loaded[kAtOnce];
      JGG_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        loaded[j] = make_uint4(0, 0, 0, 0);
        if (i + j * step < vectors)
          loaded[j] = __ldg(reinterpret_cast<const uint4*>(x) + i + j * step);
      }
      // If all elements are finite, as usual, one reduction is enough.
      Elements<kOf, kAtOnce * kCount> all;
      JGG_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        all.words[4 * j] = loaded[j].x;
        all.words[4 * j + 1] = loaded[j].y;
        all.words[4 * j + 2] = loaded[j].z;
        all.words[4 * j + 3] = loaded[j].w;
      }
      largest = max(largest, LargestFinite(all));
    }
    if (thread < elements - vectors * kCount) {
      Elements<kOf, kOf == DType::kF32 ? 1 : 2> last{};
      const int64_t at = vectors * kCount + thread;
      if constexpr (kOf == DType::kF32) {
        last.words[0] = reinterpret_cast<const uint32_t*>(x)[at];
      } else {
        last.words[0] = reinterpret_cast<const uint16_t*>(x)[at];
      }
      largest = max(largest, LargestFinite(last));
    }
    JoinAmax(largest, p.amax + m);
  }
}

// ---- blocks along columns ----

template <DType kOf>
__device__ Elements<kOf, kBlock> LoadBlock(const uint8_t* at, bool inside) {
  Elements<kOf, kBlock> x{};
  if (!inside) return x;
  JGG_UNROLL
  for (int i = 0; i < kBlock * kElementBytes<kOf> / 16; ++i) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(at) + i);
    x.words[4 * i] = four.x;
    x.words[4 * i + 1] = four.y;
    x.words[4 * i + 2] = four.z;
    x.words[4 * i + 3] = four.w;
  }
  return x;
}

// `block` is the block's number in row-major order.
template <bool kStochastic>
__device__ void EncodeBlock(const QuantizeParams& p, const Values& values, const BlockScale& scale,
                            int64_t block, uint32_t* words) {
  if constexpr (kStochastic) {
    const RandomBits random(block, __ldg(p.seed), __ldg(p.seed + 1));
    EncodeStochastic(values, scale, random, words);
  } else {
    EncodeNearest(values, scale, words);
  }
}

template <bool kStochastic>
__device__ void QuantizeBlock(const QuantizeParams& p, const Values& values,
                              const BlockScale& scale, int64_t block) {
  uint32_t words[2];
  EncodeBlock<kStochastic>(p, values, scale, block, words);
  reinterpret_cast<uint2*>(p.weight)[block] = make_uint2(words[0], words[1]);
  p.scales[block] = scale.byte;
}

inline constexpr int kRowUnits = 2;  // blocks of a thread

inline int64_t RowsBlocks(const QuantizeParams& p) {
  return CeilDiv(p.rows * p.blocks, kRowUnits * kQuantizeThreads);
}

// A thread per block; neighbouring lanes have neighbouring blocks. kAmax: the kernel finds only
// magnitudes.
template <DType kOf, bool kHadamard, bool kStochastic, bool kAmax>
__global__ void __launch_bounds__(kQuantizeThreads)
    RowsKernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kBytes = kBlock * kElementBytes<kOf>;
  const int64_t count = p.rows * p.blocks, inside = p.rows_inside() * p.blocks;
  const int64_t at = kAmax ? blockIdx.x : FromLast(blockIdx.x, gridDim.x);
  const int64_t first = at * (kRowUnits * kQuantizeThreads) + threadIdx.x;
  for (int64_t i = blockIdx.y; i < p.matrices; i += gridDim.y) {
    const int64_t m = kAmax ? i : FromLast(i, p.matrices);
    Elements<kOf, kBlock> x[kRowUnits];
    JGG_UNROLL
    for (int j = 0; j < kRowUnits; ++j) {
      const int64_t block = first + j * kQuantizeThreads;
      x[j] = LoadBlock<kOf>(p.x + (m * count + block) * kBytes, block < inside);
    }
    uint32_t amax = 0;
    MatrixScales matrix{};
    if constexpr (kAmax) {
      amax = __ldcg(p.amax + m);  // what others have found so far
    } else {
      matrix = p.matrix_scales[m];
    }
    JGG_UNROLL
    for (int j = 0; j < kRowUnits; ++j) {
      const int64_t block = first + j * kQuantizeThreads;
      if (!kAmax && block >= count) break;
      Values values = Widen(x[j]);
      if constexpr (kAmax) {
        static_assert(kHadamard);
        RaiseToRotated(values, &amax);
      } else {
        if constexpr (kHadamard) Rotate(&values);
        const float largest = kHadamard ? LargestMagnitude(values) : LargestMagnitude(x[j]);
        QuantizeBlock<kStochastic>(p, values, MakeBlockScale(largest, matrix), m * count + block);
      }
    }
    if constexpr (kAmax) JoinAmax(amax, p.amax + m);
  }
}

inline constexpr int kSquareRows = 2;  // of a thread
inline constexpr int kSquareThreads = 32 * kBlock / kSquareRows;

// One scale for 16 x 16 elements: a warp for two rows, a lane for their blocks.
template <DType kOf, bool kStochastic>
__global__ void __launch_bounds__(kSquareThreads)
    SquaresKernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kBytes = kBlock * kElementBytes<kOf>, kStep = kBlock / kSquareRows;
  __shared__ uint32_t largest[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto across = static_cast<uint32_t>(CeilDiv(p.blocks, 32));
  const uint32_t at = FromLast(blockIdx.x, gridDim.x);
  const int64_t row = int64_t{at / across} * kBlock + warp;
  const int64_t column = int64_t{at % across} * 32 + lane;
  for (int64_t i = blockIdx.y; i < p.matrices; i += gridDim.y) {
    const int64_t m = FromLast(i, p.matrices);
    const int64_t block = (m * p.rows + row) * p.blocks + column;
    Elements<kOf, kBlock> x[kSquareRows];
    JGG_UNROLL
    for (int j = 0; j < kSquareRows; ++j) {
      const bool inside = row + j * kStep < p.rows && column < p.blocks;
      x[j] = LoadBlock<kOf>(p.x + (block + j * kStep * p.blocks) * kBytes, inside);
    }
    if (warp == 0) largest[lane] = 0;
    __syncthreads();
    uint32_t own = AsBits(LargestMagnitude(x[0]));
    JGG_UNROLL
    for (int j = 1; j < kSquareRows; ++j) own = max(own, AsBits(LargestMagnitude(x[j])));
    atomicMax(&largest[lane], own);  // NaN is larger than all others
    __syncthreads();
    const BlockScale scale = MakeBlockScale(AsFloat(largest[lane]), p.matrix_scales[m]);
    JGG_UNROLL
    for (int j = 0; j < kSquareRows; ++j) {
      if (row + j * kStep >= p.rows || column >= p.blocks) break;
      QuantizeBlock<kStochastic>(p, Widen(x[j]), scale, block + j * kStep * p.blocks);
    }
    __syncthreads();
  }
}

}  // namespace jgg::nvfp4::device

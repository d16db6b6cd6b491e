// The kernels of matrices with scales of their own, which are powers of two: x (M, R, C).
//   CastOwnKernel      scales and codes from one read of x. A thread block keeps the elements of a
//                      tile in registers until all tiles of the matrix have said what their largest
//                      is. So the device must hold as many blocks at a time as a matrix has tiles.
//   LargestOwnKernel   scales alone, of larger matrices; device/cast.cuh has a kernel of codes
#pragma once

#include "fp8/device/cast.cuh"

namespace jgg::fp8::device {

struct CastOwnParams {
  CastParams cast;  // `known` are `scales`, which the kernels here write
  float* scales;    // (M,)
  // Zeros before. Of CastOwnKernel: what each tile of a matrix says, (M, blocks), and how many
  // tiles have been begun.
  uint64_t* said;
  int32_t* begun;
  uint32_t blocks;
  // Of LargestOwnKernel: the largest finite magnitude of each matrix, and how many thread blocks
  // have said theirs.
  uint32_t* found;
  int32_t* counted;
};

// A power of two by which numbers up to that magnitude have codes: the largest of them is between a
// half of the largest code and that.
template <Element kElement>
JGG_HOST_DEVICE float OwnScale(uint32_t largest) {
  if (largest == 0) return 1.0f;
  constexpr int kMore = kElement == Element::kE5M2 ? 15 : 8;
  const int range = static_cast<int>(largest >> 23) + ((largest & 0x7fffff) > 0x600000 ? 1 : 0);
  return AsFloat(static_cast<uint32_t>(max(range - kMore, 1)) << 23);
}

// A magnitude, and that it is there: one word, which is read whole or not at all.
__device__ inline void Say(uint64_t* at, uint32_t largest) {
  const uint64_t word = uint64_t{1} << 32 | largest;
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
#else
  *at = word;
#endif
}

__device__ inline uint32_t WaitFor(const uint64_t* at) {
  uint64_t word;
  JGG_NO_UNROLL
  while (true) {
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
#else
    word = *at;
#endif
    if (word >> 32 != 0) return static_cast<uint32_t>(word);
    __nanosleep(32);
  }
}

struct CastOwnShared {
  TurnedBlock turned;
  uint2 largest[kSquareThreads / 32];
  uint32_t most[kSquareThreads / 32];
  uint32_t number;
};

// A thread block takes the next tile when it knows the scale of the one before. So where it waits
// all tiles before its own are with blocks that run, and do not wait for it in turn.
template <DType kOf, Element kElement>
__device__ void CastOwn(const CastOwnParams& own, CastOwnShared& shared) {
  const QuantizeParams& p = own.cast.of;
  const auto all = static_cast<uint32_t>(p.matrices * own.blocks);
  Patch<kOf> x;
  // The number of a tile, and the thread's elements of it.
  const auto begin = [&] {
    const uint32_t number = shared.number;
    const CastPlace at(p, number % own.blocks);
    const bool exists = number < all && at.column() < p.columns;
    const int count = exists ? at.rows.count - 8 * at.eight : 0;
    const int64_t row = number / own.blocks * p.rows + at.rows.first + 8 * at.eight;
    const int64_t pitch = p.columns * kElementBytes<kOf>;
    const uint8_t* from = p.x + at.column() * kElementBytes<kOf> + row * pitch;
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = LoadEight<kOf>(from + i * pitch, i < count);
    return number;
  };
  if (threadIdx.x == 0) shared.number = static_cast<uint32_t>(atomicAdd(own.begun, 1));
  __syncthreads();
  uint32_t number = begin();
  JGG_NO_UNROLL
  while (number < all) {
    const int64_t m = number / own.blocks;
    const uint32_t block = number % own.blocks;
    LargestPair largest;
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) largest.Add<kOf>(x[i], LargestOf<kOf>(x[i]));
    largest.Share<kSquareThreads>(shared.largest);
    uint64_t* said = own.said + m * own.blocks;
    if (threadIdx.x == 0) Say(said + block, largest.finite);
    uint32_t most = 0;
    JGG_NO_UNROLL
    for (uint32_t i = threadIdx.x; i < own.blocks; i += kSquareThreads) {
      most = max(most, WaitFor(said + i));
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) shared.most[threadIdx.x / 32] = most;
    __syncthreads();
    JGG_UNROLL
    for (int i = 0; i < kSquareThreads / 32; ++i) most = max(most, shared.most[i]);
    const float scale = OwnScale<kElement>(most);
    if (threadIdx.x == 0) {
      shared.number = static_cast<uint32_t>(atomicAdd(own.begun, 1));
      if (block == 0) own.scales[m] = scale;
    }
    const SplitReciprocal by = MakeSplitReciprocal(scale);
    const CastPlace at(p, block);
    const int count = at.column() < p.columns ? at.rows.count - 8 * at.eight : 0;
    uint2 codes[8];
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) codes[i] = CastEight<kElement, kOf>(x[i], by);
    PutCodes(own.cast, at, m, count, codes, shared.turned);
    __syncthreads();
    number = begin();  // reads while codes are written
    WriteTurned(own.cast, at, m, shared.turned);
  }
}

template <DType kOf, Element kElement>
__global__ void __launch_bounds__(kSquareThreads, kOf == DType::kF32 ? 2 : 4)
    CastOwnKernel(const __grid_constant__ CastOwnParams own) {
  __shared__ CastOwnShared shared;
  CastOwn<kOf, kElement>(own, shared);
}

template <DType kOf, Element kElement>
__global__ void __launch_bounds__(kLargestThreads)
    LargestOwnKernel(const __grid_constant__ CastOwnParams own) {
  __shared__ uint2 shared[kLargestThreads / 32];
  const QuantizeParams& p = own.cast.of;
  JGG_NO_UNROLL
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    if (m != blockIdx.y) __syncthreads();  // shared memory is read
    LargestPair largest = LargestOfMatrix<kOf>(p, m, p.rows);
    largest.Share<kLargestThreads>(shared);
    if (threadIdx.x != 0) continue;
    atomicMax(own.found + m, largest.finite);
    __threadfence();
    if (atomicAdd(own.counted + m, 1) + 1 < static_cast<int32_t>(gridDim.x)) continue;
    __threadfence();
    own.scales[m] = OwnScale<kElement>(__ldcg(own.found + m));
  }
}

}  // namespace jgg::fp8::device

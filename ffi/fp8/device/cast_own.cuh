// The kernels of matrices with scales of their own, which are powers of two: x (M, R, C).
//   CastOwnKernel      scales and codes from one read of x. A thread block keeps its elements in
//                      registers until all blocks of the matrix have said what their largest is. So
//                      all blocks of a matrix must fit on the device at a time.
//   LargestOwnKernel   scales alone, of larger matrices; device/cast.cuh has a kernel of codes
#pragma once

#include "fp8/device/cast.cuh"

namespace jgg::fp8::device {

struct CastOwnParams {
  CastParams cast;  // `known` are `scales`, which the kernels here write
  float* scales;    // (M,)
  // What is found, zeros before: the largest finite magnitude of each matrix, (M,), how many thread
  // blocks have said theirs, (M,), and how many thread blocks have begun.
  uint32_t* found;
  int32_t* said;
  int32_t* begun;
  uint32_t blocks;  // of CastOwnKernel, of a matrix
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

// What other thread blocks wrote before they added to `at`, is seen behind this.
__device__ inline int32_t LoadAcquire(const int32_t* at) {
#ifdef __CUDA_ARCH__
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
#else
  return __ldcg(at);
#endif
}

// One thread of a block says its largest magnitude of matrix m, and returns how many have said
// theirs before.
__device__ inline int32_t Say(const CastOwnParams& own, int64_t m, uint32_t largest) {
  atomicMax(own.found + m, largest);
  __threadfence();
  return atomicAdd(own.said + m, 1);
}

struct CastOwnShared {
  TurnedBlock turned;
  uint2 largest[kSquareThreads / 32];
  uint32_t number;
  float scale;
};

// A block's number is that of its beginning, so those that a block waits for have begun, or begin
// as soon as there is room.
template <DType kOf, Element kElement>
__device__ void CastOwn(const CastOwnParams& own, CastOwnShared& shared) {
  const QuantizeParams& p = own.cast.of;
  if (threadIdx.x == 0) shared.number = static_cast<uint32_t>(atomicAdd(own.begun, 1));
  __syncthreads();
  const int64_t m = shared.number / own.blocks;
  const uint32_t block = shared.number % own.blocks;
  const CastPlace at(p, block);
  const int count = at.column() < p.columns ? at.rows.count - 8 * at.eight : 0;
  const int64_t row = m * p.rows + at.rows.first + 8 * at.eight;
  const int64_t pitch = p.columns * kElementBytes<kOf>;
  const uint8_t* from = p.x + at.column() * kElementBytes<kOf> + row * pitch;
  Patch<kOf> x;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = LoadEight<kOf>(from + i * pitch, i < count);
  LargestPair largest;
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) largest.Add<kOf>(x[i], LargestOf<kOf>(x[i]));
  largest.Share<kSquareThreads>(shared.largest);
  if (threadIdx.x == 0) {
    const auto all = static_cast<int32_t>(own.blocks);
    if (Say(own, m, largest.finite) + 1 < all) {
      while (LoadAcquire(own.said + m) < all) __nanosleep(64);
    }
    __threadfence();
    shared.scale = OwnScale<kElement>(__ldcg(own.found + m));
    if (block == 0) own.scales[m] = shared.scale;
  }
  __syncthreads();
  const SplitReciprocal by = MakeSplitReciprocal(shared.scale);
  uint2 codes[8];
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) codes[i] = CastEight<kElement, kOf>(x[i], by);
  PutCodes(own.cast, at, m, count, codes, shared.turned);
  if (own.cast.turned != nullptr) __syncthreads();
  WriteTurned(own.cast, at, m, shared.turned);
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
    if (Say(own, m, largest.finite) + 1 < static_cast<int32_t>(gridDim.x)) continue;
    __threadfence();
    own.scales[m] = OwnScale<kElement>(__ldcg(own.found + m));
  }
}

}  // namespace jgg::fp8::device

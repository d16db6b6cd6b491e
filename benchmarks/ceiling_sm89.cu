// The ceiling of FP8 by `mma.sync` on this GPU: CUTLASS's own GEMMs of Ada, e4m3 to bfloat16, in
// the tiles that are fast there. One scale is for all, so nothing is promoted; "staged" adds up the
// sums of a slice in registers of their own. Hopper and Blackwell (10.0) have no such instruction:
// there the compiler makes 16-bit products of it.
//
//   cd benchmarks
//   nvcc -std=c++17 -O3 -arch=sm_89 --expt-relaxed-constexpr -I<cutlass>/include ceiling_sm89.cu
//   ./a.out [M N K]...
//
// It prints a line for each product, sum and tile: TFLOP/s, of the median of 9.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "ceiling.cuh"
#include "cutlass/gemm/device/gemm.h"

namespace {

using Code = cutlass::float_e4m3_t;
using Result = cutlass::bfloat16_t;
using cutlass::gemm::GemmShape;

// Codes of either sign up to 240.
__global__ void Fill(uint8_t* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    to[i] = static_cast<uint8_t>((x >> 8) % 120 | (x & 128));
  }
}

struct Problem {
  int m, n, k;
  Code *a, *b;
  Result* out;
};

template <typename Operator, int kM, int kN, int kK, int kStages>
void Time(const Problem& p) {
  using Gemm = cutlass::gemm::device::Gemm<
      Code, cutlass::layout::RowMajor, Code, cutlass::layout::ColumnMajor, Result,
      cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm89,
      GemmShape<kM, kN, kK>, GemmShape<64, 64, kK>, GemmShape<16, 8, 32>,
      cutlass::epilogue::thread::LinearCombination<
          Result, 8, float, float, cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages, 16, 16, false,
      Operator>;
  const bool fast = std::is_same_v<Operator, cutlass::arch::OpMultiplyAddFastAccum>;
  typename Gemm::Arguments arguments({p.m, p.n, p.k}, {p.a, p.k}, {p.b, p.k}, {p.out, p.n},
                                     {p.out, p.n}, {1.0f});
  const auto ms = Milliseconds<Gemm>(arguments, 2, 9);
  if (!ms) return;
  std::printf("%6d %6d %6d  %s  %3dx%3dx%3d %d stages  %6.1f TFLOP/s\n", p.m, p.n, p.k,
              fast ? "fast  " : "staged", kM, kN, kK, kStages, 2e-9 * p.m * p.n * p.k / *ms);
}

template <typename Operator>
void TimeTiles(const Problem& p) {
  Time<Operator, 128, 256, 64, 3>(p);
  Time<Operator, 128, 128, 64, 4>(p);
}

void Run(int m, int n, int k) {
  Problem p{m, n, k, nullptr, nullptr, nullptr};
  const size_t a = size_t(m) * k, b = size_t(n) * k;
  Check(cudaMalloc(&p.a, a));
  Check(cudaMalloc(&p.b, b));
  Check(cudaMalloc(&p.out, size_t(m) * n * sizeof(Result)));
  Fill<<<1024, 256>>>(reinterpret_cast<uint8_t*>(p.a), a, 1);
  Fill<<<1024, 256>>>(reinterpret_cast<uint8_t*>(p.b), b, 2);
  TimeTiles<cutlass::arch::OpMultiplyAddFastAccum>(p);
  TimeTiles<cutlass::arch::OpMultiplyAdd>(p);
  Check(cudaFree(p.a));
  Check(cudaFree(p.b));
  Check(cudaFree(p.out));
}

}  // namespace

int main(int argc, char** argv) { RunProducts(argc, argv, Run); }

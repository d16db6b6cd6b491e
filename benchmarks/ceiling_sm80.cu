// The ceiling of `mma.sync` on this GPU: CUTLASS's own GEMMs of Ampere, bfloat16, in the tiles that
// are fast there. One group of rows in the generic kernel is the same product.
//
//   cd benchmarks
//   nvcc -std=c++17 -O3 -arch=sm_80 --expt-relaxed-constexpr -I<cutlass>/include ceiling_sm80.cu
//   ./a.out [M N K]...
//
// It prints a line for each product, layout of B and tile: TFLOP/s, of the median of 20.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "ceiling.cuh"
#include "cutlass/gemm/device/gemm.h"

namespace {

using Element = cutlass::bfloat16_t;
using cutlass::gemm::GemmShape;

__global__ void Fill(Element* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    to[i] = Element(static_cast<float>((x ^ x >> 16) & 0xffff) / 32768.0f - 1.0f);
  }
}

struct Problem {
  int m, n, k;
  Element *a, *b, *out;
};

template <typename LayoutB, int kM, int kN, int kK, int kStages>
void Time(const Problem& p) {
  using Gemm = cutlass::gemm::device::Gemm<
      Element, cutlass::layout::RowMajor, Element, LayoutB, Element, cutlass::layout::RowMajor,
      float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, GemmShape<kM, kN, kK>,
      GemmShape<64, 64, kK>, GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<
          Element, 8, float, float, cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages>;
  const bool rows = std::is_same_v<LayoutB, cutlass::layout::RowMajor>;
  typename Gemm::Arguments arguments({p.m, p.n, p.k}, {p.a, p.k}, {p.b, rows ? p.n : p.k},
                                     {p.out, p.n}, {p.out, p.n}, {1.0f});
  const auto ms = Milliseconds<Gemm>(arguments, 3, 20);
  if (!ms) return;
  std::printf("%6d %6d %6d  %s  %3dx%3dx%2d %d stages  %6.1f TFLOP/s\n", p.m, p.n, p.k,
              rows ? "KxN" : "NxK", kM, kN, kK, kStages, 2e-9 * p.m * p.n * p.k / *ms);
}

template <typename LayoutB>
void TimeTiles(const Problem& p) {
  Time<LayoutB, 128, 256, 32, 3>(p);
  Time<LayoutB, 128, 256, 64, 3>(p);
  Time<LayoutB, 256, 128, 32, 3>(p);
  Time<LayoutB, 128, 128, 32, 4>(p);
}

void Run(int m, int n, int k) {
  Problem p{m, n, k, nullptr, nullptr, nullptr};
  const size_t a = size_t(m) * k, b = size_t(n) * k;
  Check(cudaMalloc(&p.a, a * sizeof(Element)));
  Check(cudaMalloc(&p.b, b * sizeof(Element)));
  Check(cudaMalloc(&p.out, size_t(m) * n * sizeof(Element)));
  Fill<<<1024, 256>>>(p.a, a, 1);
  Fill<<<1024, 256>>>(p.b, b, 2);
  TimeTiles<cutlass::layout::RowMajor>(p);
  TimeTiles<cutlass::layout::ColumnMajor>(p);
  Check(cudaFree(p.a));
  Check(cudaFree(p.b));
  Check(cudaFree(p.out));
}

}  // namespace

int main(int argc, char** argv) { RunProducts(argc, argv, Run); }

// Everything before FP8's products on Blackwell, as grouped_mm/prepare_sm100.cu, with scales.
#include "fp8/gemm_sm100.h"
#include "fp8/scales_sm100.cuh"
#include "grouped_mm/device/groups_sm100.cuh"
#include "grouped_mm/groups_sm100.cuh"

namespace jgg::sm100 {

// Scales of operands, the blocks of a line one after another: of A (T, K / 128) in mm, and in wgrad
// of both (lines, T / 128); of w (G, ceil(N / 128), ceil(K / 128)).
struct Scales {
  const float *a, *b;
  int64_t line;  // blocks of a line
};

struct ScaledGroups {
  Groups groups;
  const float **scales_a, **scales_b;
  ScaleLayoutA* layout_a;
  uint8_t* layout_b;  // one of two types, for either product

  ScaledGroups(const ScaledWorkspace& at, uint8_t* base)
      : groups(at.groups, base),
        scales_a(reinterpret_cast<const float**>(base + at.scales_a)),
        scales_b(reinterpret_cast<const float**>(base + at.scales_b)),
        layout_a(reinterpret_cast<ScaleLayoutA*>(base + at.layout_a)),
        layout_b(base + at.layout_b) {}

  template <bool kWgrad>
  __device__ ScaleLayoutB<kWgrad>* LayoutB() const {
    return reinterpret_cast<ScaleLayoutB<kWgrad>*>(layout_b);
  }
};

template <bool kWgrad>
__global__ void __launch_bounds__(device::kGroupThreads, 1)
    ScaledGroupsKernel(Product product, Metadata metadata, int64_t problems, Bases bases,
                       Scales scales, ScaledGroups to) {
  const int line = static_cast<int>(scales.line);
  const auto store = [&](int64_t p, const GroupProblem& problem) {
    to.groups.Store(product, bases, p, problem);
    const int blocks = (problem.k + 127) / 128, columns = (problem.n + 127) / 128;
    if (kWgrad) {
      const int first = problem.x_start / 128;
      to.scales_a[p] = scales.a + first;
      to.scales_b[p] = scales.b + first;
    } else {
      to.scales_a[p] = scales.a + problem.x_start * scales.line;
      to.scales_b[p] = scales.b + int64_t{problem.matrix} * columns * scales.line;
    }
    to.layout_a[p] = MakeScaleLayout<ScaleLayoutA>(problem.m, blocks, line);
    to.template LayoutB<kWgrad>()[p] =
        MakeScaleLayout<ScaleLayoutB<kWgrad>>(kWgrad ? problem.n : columns, blocks, line);
  };
  device::FindGroups(product, metadata, problems, to.groups.gaps, to.groups.gap_count, store);
}

}  // namespace jgg::sm100

namespace jgg {

cudaError_t PrepareFp8Sm100(cudaStream_t stream, const Fp8GemmSm100& fp8,
                            const sm100::ScaledWorkspace& at, uint8_t* base) {
  const GemmSm100& gemm = fp8.gemm;
  const sm100::Product& product = gemm.product;
  const int64_t along = product.wgrad ? product.rows_x : product.k;
  const sm100::Scales scales{fp8.a_scales, fp8.b_scales, (along + 127) / 128};
  const auto kernel =
      product.wgrad ? sm100::ScaledGroupsKernel<true> : sm100::ScaledGroupsKernel<false>;
  kernel<<<1, device::kGroupThreads, 0, stream>>>(product, gemm.metadata, gemm.Problems(),
                                                  sm100::Bases(gemm), scales,
                                                  sm100::ScaledGroups(at, base));
  if (cudaError_t error = cudaGetLastError()) return error;
  // Matrices of empty groups keep what is added to.
  if (fp8.accumulate) return cudaSuccess;
  return ZeroRestSm100(stream, gemm, at.groups, base);
}

}  // namespace jgg

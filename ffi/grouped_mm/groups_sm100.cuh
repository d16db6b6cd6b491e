// The arrays of the workspace that CUTLASS reads, as the kernels before a product write them.
#pragma once

#include "cute/tensor.hpp"
#include "grouped_mm/gemm_sm100.h"

// NOTE: tools/check_sass.py looks for the product's instructions where a kernel's name has "Sm100".
namespace jgg::sm100 {

using Shape = cute::Shape<int, int, int>;
static_assert(sizeof(Shape) == kShapeBytes);
static_assert(sizeof(int64_t) == kStrideBytes);

// Where operands and the result begin.
struct Bases {
  const uint8_t *a, *b;
  uint8_t* out;

  explicit Bases(const GemmSm100& gemm)
      : a(static_cast<const uint8_t*>(gemm.a)),
        b(static_cast<const uint8_t*>(gemm.b)),
        out(static_cast<uint8_t*>(gemm.out)) {}
};

struct Groups {
  Shape* shapes;
  const uint8_t **a, **b;
  uint8_t** out;
  int64_t *stride_a, *stride_b, *stride_out;
  Gap* gaps;
  int* gap_count;

  Groups(const Workspace& at, uint8_t* base)
      : shapes(reinterpret_cast<Shape*>(base + at.shapes)),
        a(reinterpret_cast<const uint8_t**>(base + at.a)),
        b(reinterpret_cast<const uint8_t**>(base + at.b)),
        out(reinterpret_cast<uint8_t**>(base + at.out)),
        stride_a(reinterpret_cast<int64_t*>(base + at.stride_a)),
        stride_b(reinterpret_cast<int64_t*>(base + at.stride_b)),
        stride_out(reinterpret_cast<int64_t*>(base + at.stride_out)),
        gaps(reinterpret_cast<Gap*>(base + at.gaps)),
        gap_count(reinterpret_cast<int*>(base + at.gap_count)) {}

  __device__ void Store(const Product& product, const Bases& bases, int64_t p,
                        const GroupProblem& problem) const {
    shapes[p] = cute::make_shape(problem.m, problem.n, problem.k);
    a[p] = bases.a + problem.a;
    b[p] = bases.b + problem.b;
    out[p] = bases.out + problem.out;
    stride_a[p] = product.a_line();
    stride_b[p] = product.b_line();
    stride_out[p] = product.n;
  }
};

}  // namespace jgg::sm100

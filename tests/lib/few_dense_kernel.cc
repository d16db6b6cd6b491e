// The kernels of a few tokens' experts with 16-bit weights (ffi/moe/device/few_dense_sm80.cuh) on
// the host, for test_few_dense_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "few_experts.h"
#include "moe/device/few_dense_sm80.cuh"

using namespace jgg;

namespace {

template <DType kX, bool kTransposed>
void Run(const FewDense& dense, bool up, int columns) {
  using namespace device;
  const FewTokens& experts = dense.experts;
  const bool gated = IsGated(experts.activation);
  const auto tokens = static_cast<unsigned>(experts.tokens);
  const auto blocks = [](int all, int of) { return static_cast<unsigned>((all + of - 1) / of); };
  if (up) {
    return RunBlocks({blocks(experts.f, gated ? 32 : 64), tokens * experts.k}, kDenseThreads, [&] {
      gated ? FewDenseUpSm80Kernel<kX, kTransposed, true, Finish>(dense)
            : FewDenseUpSm80Kernel<kX, kTransposed, false, Finish>(dense);
    });
  }
  RunBlocks({tokens, blocks(experts.d, columns)}, kDenseThreads, [&] {
    columns == 64   ? FewDenseDownSm80Kernel<kX, kTransposed, 1, Finish>(dense)
    : columns == 32 ? FewDenseDownSm80Kernel<kX, kTransposed, 2, Finish>(dense)
                    : FewDenseDownSm80Kernel<kX, kTransposed, 4, Finish>(dense);
  });
}

}  // namespace

struct Problem {
  const void* x;
  void* a;
  float* out;
  const int32_t *index, *offset;
  const float* weight;
  const void* w;
  const float* bias;
  int32_t tokens, k, experts, d, f, gated, half, transposed, columns, up;
};

// One of the two kernels; `columns` of a block of down.
extern "C" void few_dense_kernel(const Problem* problem) {
  const Problem& p = *problem;
  FewDense dense{};
  dense.experts = ExpertsOf(p);
  const FewTokens& few = dense.experts;
  dense.w = p.w;
  const bool up = p.up != 0;
  const size_t wide = up && p.gated ? 2 : 1;
  readable.assign({{few.x, size_t(2) * p.tokens * p.d},
                   {few.a, size_t(2) * p.tokens * p.k * p.f},
                   {static_cast<const char*>(p.w), 2 * wide * p.experts * p.d * p.f}});
  const auto run = [&](auto dtype) {
    p.transposed ? Run<dtype.value, true>(dense, up, p.columns)
                 : Run<dtype.value, false>(dense, up, p.columns);
  };
  if (p.half) {
    run(std::integral_constant<DType, DType::kF16>{});
  } else {
    run(std::integral_constant<DType, DType::kBF16>{});
  }
}

extern "C" int few_dense_columns(int64_t tokens, int64_t d) {
  return rules::FewDenseColumns(tokens, d);
}

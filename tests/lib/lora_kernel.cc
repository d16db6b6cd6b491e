// The kernel of products of low rank (ffi/grouped_mm/device/lora_sm80.cuh) on the host, for
// test_lora_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "grouped_mm/device/lora_sm80.cuh"

using namespace jgg;

namespace {

template <DType kX>
void Run(const Lora& lora) {
  using namespace device;
  const auto blocks = static_cast<unsigned>((lora.rows + lora.span - 1) / lora.span);
  RunBlocks({blocks, 1}, kLoraThreads, [&] {
    switch (lora.rank) {
      case 8: return LoraSm80Kernel<kX, 8>(lora);
      case 16: return LoraSm80Kernel<kX, 16>(lora);
      case 32: return LoraSm80Kernel<kX, 32>(lora);
      default: return LoraSm80Kernel<kX, 64>(lora);
    }
  });
}

}  // namespace

struct Problem {
  const char *x, *a, *b;
  const int32_t *pair_of, *row_of;
  const float* row_scale;
  const char* existing;
  char* out;
  int32_t rows, rows_x, k, n, rank, pairs, span, half;
  float scale;
};

extern "C" void lora_kernel(const Problem* problem) {
  const Problem& p = *problem;
  const Lora lora{p.x,    p.a, p.b, p.pair_of, p.row_of, p.row_scale, p.existing, p.out,
                  p.rows, p.k, p.n, p.rank,    p.pairs,  p.span,      p.scale};
  const auto pairs = static_cast<size_t>(p.pairs);
  readable.assign({{p.x, size_t(2) * p.rows_x * p.k},
                   {p.a, pairs * p.rank * p.k * 2},
                   {p.b, pairs * p.n * p.rank * 2}});
  p.half ? Run<DType::kF16>(lora) : Run<DType::kBF16>(lora);
}

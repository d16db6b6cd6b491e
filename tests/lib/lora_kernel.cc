// The kernel of products of low rank (ffi/grouped_mm/device/lora_sm80.cuh) on the host, for
// test_lora_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "grouped_mm/device/lora_sm80.cuh"

using namespace jgg;

namespace {

template <DType kX, bool kTurned, int kTall>
void Run(const Lora& lora) {
  using namespace device;
  const auto blocks = static_cast<unsigned>((lora.rows + lora.span - 1) / lora.span);
  RunBlocks({blocks, 1}, kLoraThreads, [&] {
    switch (lora.rank) {
      case 8: return LoraSm80Kernel<kX, 8, kTurned, 1>(lora);
      case 16: return LoraSm80Kernel<kX, 16, kTurned, kTall>(lora);
      case 32: return LoraSm80Kernel<kX, 32, kTurned, kTall>(lora);
      default: return LoraSm80Kernel<kX, 64, kTurned, 1>(lora);
    }
  });
}

}  // namespace

struct Problem {
  const char *x, *a, *b;
  const int32_t *pair_of, *row_of;
  const float* row_scale;
  const char* existing;
  char *out, *h;
  int32_t rows, k, n, rank, pairs, span, half, turned, tall;
  float scale;
};

extern "C" void lora_kernel(const Problem* problem) {
  const Problem& p = *problem;
  Lora lora{};
  lora.x = p.x;
  lora.a = p.a;
  lora.b = p.b;
  lora.pair_of = p.pair_of;
  lora.row_of = p.row_of;
  lora.row_scale = p.row_scale;
  lora.existing = p.existing;
  lora.out = p.out;
  lora.h = p.h;
  lora.rows = p.rows;
  lora.k = p.k;
  lora.n = p.n;
  lora.rank = p.rank;
  lora.pairs = p.pairs;
  lora.span = p.span;
  lora.scale = p.scale;
  const auto pairs = static_cast<size_t>(p.pairs);
  readable.assign({{p.x, size_t(2) * p.rows * p.k},
                   {p.a, pairs * p.rank * p.k * 2},
                   {p.b, pairs * p.n * p.rank * 2}});
  const auto run = [&](auto dtype) {
    const auto tall = [&](auto turned) {
      p.tall ? Run<dtype.value, turned.value, 2>(lora) : Run<dtype.value, turned.value, 1>(lora);
    };
    p.turned ? tall(std::true_type{}) : tall(std::false_type{});
  };
  if (p.half) {
    run(std::integral_constant<DType, DType::kF16>{});
  } else {
    run(std::integral_constant<DType, DType::kBF16>{});
  }
}

// The kernel of products of low rank (ffi/grouped_mm/device/lora_sm80.cuh) on the host, for
// test_lora_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "grouped_mm/device/lora_sm80.cuh"

using namespace jgg;

namespace {

template <DType kX, int kRank, bool kTurned, device::LoraKind kKind>
void RunKind(const Lora& lora) {
  const auto blocks = static_cast<unsigned>((lora.rows + lora.span - 1) / lora.span);
  RunBlocks({blocks, 1}, device::kLoraThreads,
            [&] { device::LoraSm80Kernel<kX, kRank, kTurned, kKind>(lora); });
}

template <DType kX, int kRank, bool kTurned>
void RunRank(const Lora& lora, device::LoraKind kind) {
  using device::LoraKind;
  if constexpr (kRank > 8 && !kTurned) {
    if (kind == LoraKind::kDeep) return RunKind<kX, kRank, kTurned, LoraKind::kDeep>(lora);
  }
  RunKind<kX, kRank, kTurned, LoraKind::kShort>(lora);
}

template <DType kX, bool kTurned>
void Run(const Lora& lora, device::LoraKind kind) {
  // Compiling takes longer than running: not every rank of every dtype.
  const auto run = [&](auto rank) {
    constexpr bool kOfHalf = rank.value == 16 || rank.value == 32;
    if constexpr (kX == DType::kF16 ? !kOfHalf : rank.value == 32) {
      std::fprintf(stderr, "no such instance\n");
      std::abort();
    } else {
      RunRank<kX, rank.value, kTurned>(lora, kind);
    }
  };
  switch (lora.rank) {
    case 8: return run(std::integral_constant<int, 8>{});
    case 16: return run(std::integral_constant<int, 16>{});
    case 32: return run(std::integral_constant<int, 32>{});
    default: return run(std::integral_constant<int, 64>{});
  }
}

}  // namespace

struct Problem {
  const char *x, *a, *b;
  const int32_t *pair_of, *row_of;
  const float* row_scale;
  const char* existing;
  char *out, *h;
  int32_t rows, k, n, rank, pairs, span, half, turned, kind;
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
    const auto kind = static_cast<device::LoraKind>(p.kind);
    p.turned ? Run<dtype.value, true>(lora, kind) : Run<dtype.value, false>(lora, kind);
  };
  if (p.half) {
    run(std::integral_constant<DType, DType::kF16>{});
  } else {
    run(std::integral_constant<DType, DType::kBF16>{});
  }
}

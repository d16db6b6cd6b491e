// The kernels of low rank's weight gradients (ffi/grouped_mm/device/lora_wgrad_sm80.cuh) on the
// host, for test_lora_wgrad_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "async_on_host.h"
//
#include "grouped_mm/device/lora_wgrad_sm80.cuh"
#include "grouped_mm/rules.h"

using namespace jgg;

namespace {

template <DType kX, int kRank>
void Run(const LoraWgrad& lora) {
  constexpr unsigned kThreads = device::kLoraWgradThreads;
  RunBlocks({static_cast<unsigned>(lora.pairs) / kThreads + 1, 1}, kThreads,
            [&] { device::LoraBeginsKernel(lora); });
  const auto parts = static_cast<unsigned>(lora.parts[0] + lora.parts[1]);
  RunBlocks({static_cast<unsigned>(lora.pairs), parts}, kThreads,
            [&] { device::LoraWgradSm80Kernel<kX, kRank>(lora); });
}

}  // namespace

struct Problem {
  const char *wide[2], *narrow[2];
  char* out[2];
  const int32_t *pair_of, *row_of;
  int32_t* begins;
  int32_t rows, rank, pairs, length[2];
};

// Ranks 8, 32 and 64 of bfloat16, and 16 of float16.
extern "C" void lora_wgrad_kernel(const Problem* problem) {
  const Problem& p = *problem;
  LoraWgrad lora{};
  const auto rows = static_cast<size_t>(p.rows);
  readable = {{reinterpret_cast<const char*>(p.pair_of), 4 * rows},
              {reinterpret_cast<const char*>(p.row_of), 4 * rows}};
  for (int i = 0; i < 2; ++i) {
    lora.wide[i] = p.wide[i], lora.narrow[i] = p.narrow[i], lora.out[i] = p.out[i];
    lora.length[i] = p.length[i];
    lora.parts[i] = rules::LoraWgradParts(p.length[i]);
    readable.push_back({p.wide[i], 2 * rows * p.length[i]});
    readable.push_back({p.narrow[i], 2 * rows * p.rank});
  }
  lora.pair_of = p.pair_of;
  lora.row_of = p.row_of;
  lora.begins = p.begins;
  lora.rows = p.rows;
  lora.rank = p.rank;
  lora.pairs = p.pairs;
  switch (lora.rank) {
    case 8: return Run<DType::kBF16, 8>(lora);
    case 16: return Run<DType::kF16, 16>(lora);
    case 32: return Run<DType::kBF16, 32>(lora);
    default: return Run<DType::kBF16, 64>(lora);
  }
}

// The kernel of top_k on the host, for test_top_k_kernel.py.
#include "cuda_on_host.h"
//
#include "moe/device/top_k.cuh"

using namespace jgg;

template <int kItems>
static void Run(const TopKArgs& args) {
  const unsigned warps = device::kTopKWarps;
  const auto blocks = (static_cast<unsigned>(args.tokens) + warps - 1) / warps;
  Run(blocks, 32 * warps, [&] { device::TopK<kItems>(args); });
}

extern "C" void top_k_kernel(const TopKArgs* args, int items) {
  switch (items) {
    case 1: return Run<1>(*args);
    case 2: return Run<2>(*args);
    case 4: return Run<4>(*args);
    case 8: return Run<8>(*args);
    case 16: return Run<16>(*args);
    default: return Run<32>(*args);
  }
}

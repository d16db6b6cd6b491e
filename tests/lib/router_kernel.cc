// The kernel of a router of few tokens on the host, for test_router_kernel.py: all blocks of a
// cluster at once.
#include "cuda_on_host.h"
//
#include <optional>

#include "moe/router.h"

namespace jgg::device {

struct Cluster {
  Barrier barrier;
  std::vector<std::vector<float>> memory;  // of each block
  int threads;                             // of a block
};
inline Cluster* cluster = nullptr;
inline thread_local OfThread<std::optional<Barrier::arrival_token>> arrived;

inline int BlockThreads() { return cluster->threads; }
inline int ClusterBlocks() { return static_cast<int>(cluster->memory.size()); }
inline int BlockOfCluster() { return static_cast<int>(blockIdx.x) % ClusterBlocks(); }
inline float* Memory() { return cluster->memory[BlockOfCluster()].data(); }
inline char* BlockMemory() { return reinterpret_cast<char*>(Memory()); }
template <bool kReleases>
void ArriveAtCluster() {
  if (*arrived) std::abort();
  arrived->emplace(cluster->barrier.arrive());
}
inline void WaitForCluster() {
  cluster->barrier.wait(std::move(arrived->value()));
  arrived->reset();
}
inline void WriteTo(int block, float* place, float value) {
  const auto number = place - Memory();
  cluster->memory[block].at(number) = value;
}

}  // namespace jgg::device

#include "moe/device/router_sm90.cuh"

using namespace jgg;

template <bool kBFloat16, bool kTransposed, int kItems, int kTokens>
static void RunTokens(const RouterArgs& args, int blocks, int threads) {
  const int clusters = (args.choice.tokens + kTokens - 1) / kTokens;
  const RouterMemory memory =
      RouterMemoryOf(kTransposed, threads, args.part, args.choice.experts, blocks, kTokens);
  for (int c = 0; c < clusters; ++c) {
    const std::vector<float> nothing(memory.bytes() / 4, NAN);
    device::Cluster cluster{Barrier(blocks * threads),
                            std::vector<std::vector<float>>(blocks, nothing), threads};
    device::cluster = &cluster;
    RunCluster(blocks, {static_cast<unsigned>(c * blocks), 0}, 0, threads / 32,
               [&] { device::RouterSm90Kernel<kBFloat16, kTransposed, kItems, kTokens>(args); });
  }
}

template <bool kBFloat16, bool kTransposed, int kItems>
static void RunItems(const RouterArgs& args, int blocks, int threads) {
  args.choice.tokens == 1
      ? RunTokens<kBFloat16, kTransposed, kItems, 1>(args, blocks, threads)
      : RunTokens<kBFloat16, kTransposed, kItems, kRouterTokens>(args, blocks, threads);
}

template <bool kBFloat16, bool kTransposed>
static void Run(const RouterArgs& args, int blocks, int threads) {
  args.choice.experts > 128 ? RunItems<kBFloat16, kTransposed, 16>(args, blocks, threads)
                            : RunItems<kBFloat16, kTransposed, 4>(args, blocks, threads);
}

extern "C" void router_kernel(const RouterArgs* args, int bfloat16, int transposed, int blocks,
                              int threads) {
  const RouterArgs& of = *args;
  const size_t d = of.d, rows = of.choice.tokens, experts = of.choice.experts;
  readable.assign({{static_cast<const char*>(of.x), rows * d * Size(of.x_dtype)},
                   {static_cast<const char*>(of.w), d * experts * (bfloat16 ? 2 : 4)}});
  if (bfloat16) {
    transposed ? Run<true, true>(of, blocks, threads) : Run<true, false>(of, blocks, threads);
  } else {
    transposed ? Run<false, true>(of, blocks, threads) : Run<false, false>(of, blocks, threads);
  }
}

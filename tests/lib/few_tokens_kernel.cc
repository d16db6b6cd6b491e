// The kernels of a few tokens' experts (ffi/moe/device/few_tokens_sm90.cuh) on the host, for
// test_few_tokens_kernel.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "few_experts.h"
#include "moe/device/few_grouped_down_sm90.cuh"
#include "moe/device/few_tokens_sm90.cuh"

using namespace jgg;

namespace {

template <typename Tiles, typename Up, typename Down>
void Run(const FewTokens& experts, bool up) {
  using namespace device;
  const auto tokens = static_cast<unsigned>(experts.tokens);
  const auto f = static_cast<unsigned>(experts.f), d = static_cast<unsigned>(experts.d);
  if (!up) {
    return RunBlocks({d / Down::kColumns, tokens}, Down::kDownThreads,
                     [&] { FewDownSm90Kernel<Tiles, Down, Finish>(experts); });
  }
  RunBlocks({f / Up::kColumns, tokens * experts.k}, Up::kUpThreads, [&] {
    IsGated(experts.activation) ? FewUpSm90Kernel<Tiles, true, Up, Finish>(experts)
                                : FewUpSm90Kernel<Tiles, false, Up, Finish>(experts);
  });
}

template <Mode kMode, int kBits>
void Run(const FewTokens& experts, bool up) {
  using Tiles = device::PackedTiles<kMode, kBits>;
  using Shapes = device::FewShapes<Tiles>;
  if (experts.tokens * experts.k > rules::kFewestPairs) {
    Run<Tiles, typename Shapes::Up, typename Shapes::Down>(experts, up);
  } else {
    Run<Tiles, typename Shapes::FewestUp, typename Shapes::FewestDown>(experts, up);
  }
}

// `down` by groups, with so many blocks of so many groups.
template <Mode kMode, int kBits>
void RunGroupedDown(const FewTokens& experts, unsigned blocks, int most_groups, int rows_shift) {
  using namespace device;
  using Tiles = PackedTiles<kMode, kBits>;
  using Shape = GroupedDownShape<Tiles>;
  const FewGroupedDown down{experts,
                            most_groups,
                            rows_shift,
                            Divisor::Of(blocks),
                            Divisor::Of(experts.d / kStrip),
                            Divisor::Of(std::max(experts.f / 64, Shape::kAhead))};
  RunBlocks({blocks, 1}, Shape::kThreads,
            [&] { FewGroupedDownSm90Kernel<Tiles, Shape, Finish>(down); });
  const auto d = static_cast<unsigned>(experts.d), tokens = static_cast<unsigned>(experts.tokens);
  RunBlocks({(d + kSumColumns - 1) / kSumColumns, tokens}, kSumThreads,
            [&] { FewSumSm90Kernel<Finish>(experts); });
}

}  // namespace

struct Problem {
  const void* x;
  void* a;
  float* out;
  const int32_t *index, *offset;
  const float* weight;
  const void *codes, *scales;
  const float *global_scale, *bias;
  float* terms;
  int32_t tokens, k, experts, d, f, columns, inner, tile_scales, gated, up, blocks, groups,
      rows_shift;
};

// One of the two kernels; w is (experts, columns, inner).
extern "C" int few_tokens_kernel(const Problem* problem, int mode, int bits) {
  const Problem& p = *problem;
  FewTokens few = ExpertsOf(p);
  few.terms = p.terms;
  few.w.packed = {p.codes, p.columns / 64, p.inner / 64, p.tile_scales};
  few.w.scales = p.scales;
  few.w.global_scale = {p.global_scale, 1, 0};
  readable.assign({{few.x, size_t(2) * p.tokens * p.d}, {few.a, size_t(2) * p.tokens * p.k * p.f}});
  const bool up = p.up != 0;
  return Formats::Dispatch(static_cast<Mode>(mode), bits, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kCode == CodeType::kInteger && Format::kBits != 4) {
      return 1;
    } else {
      if (up || p.blocks == 0) return Run<Format::kMode, Format::kBits>(few, up), 0;
      const auto blocks = static_cast<unsigned>(p.blocks);
      return RunGroupedDown<Format::kMode, Format::kBits>(few, blocks, p.groups, p.rows_shift), 0;
    }
  });
}

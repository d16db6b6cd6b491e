// The tiles of the generic kernel's blocks (ffi/grouped_mm/device/schedule_sm80.cuh) on the host,
// for test_sm80_schedule.py.
#include "cuda_on_host.h"
//
inline bool __syncthreads_and(bool value) { return !__syncthreads_or(!value); }
namespace jgg::device {
inline int ThreadAnew() { return static_cast<int>(threadIdx.x); }
}  // namespace jgg::device
#include "grouped_mm/device/schedule_sm80.cuh"

using namespace jgg;

struct Problem {
  const int32_t *data, *offset;
  int32_t kind, count, order, wgrad, gated, run_bits;
  int64_t rows_x, rows_y, m, n, groups;
};

// Rows and columns of the result that a block writes: `weight` is negative for zeros. mm: they are
// products of rows of x from `x_row` on, of one segment; wgrad: of `length` rows from there on.
struct Written {
  int32_t block, weight, x_row, length;
  int64_t row, rows, column, columns;
};

template <int kM, int kN, int kThreads, int kWindow, bool kShares, bool kMm, bool kSizes = false>
static int64_t Run(const GemmSm80& gemm, unsigned blocks, Written* to, int64_t most) {
  using Work = device::Schedule<kM, kN, kThreads, kMm, false, kWindow, kShares, kSizes>;
  int64_t count = 0;
  RunBlocks({blocks, 1}, kThreads, [&] {
    static typename Work::Memory memory;
    static device::Tile tile;
    Work work(gemm, memory);
    while (work.Next(tile)) {
      int index = -1;
      Segment segment{};
      bool any = false;
      while (work.NextSegment(tile, index, segment)) {
        if (threadIdx.x == 0 && count < most) {
          const int64_t ahead = kMm ? tile.row0 + tile.m_lo - segment.y_start : 0;
          to[count++] = {static_cast<int32_t>(blockIdx.x),
                         segment.weight,
                         static_cast<int32_t>(segment.x_start + ahead),
                         segment.length,
                         tile.row0 + tile.m_lo,
                         tile.m_hi - tile.m_lo,
                         tile.n0,
                         tile.n_count};
        }
        any = true;
        __syncthreads();
      }
      if (!any && threadIdx.x == 0 && count < most) {
        to[count++] = {static_cast<int32_t>(blockIdx.x),
                       kMm ? -1 : tile.weight,
                       0,
                       0,
                       tile.row0 + tile.m_lo,
                       tile.m_hi - tile.m_lo,
                       tile.n0,
                       tile.n_count};
      }
      __syncthreads();
    }
  });
  return count;
}

// How many pieces the blocks write, of which `to` has the first `most`. Tiles: 0 Wide, 1 Square,
// 2 as kernels without a pipeline have them.
extern "C" int64_t tiles_of_blocks(const Problem* problem, int tile, int blocks, Written* to,
                                   int64_t most) {
  const Problem& p = *problem;
  GemmSm80 gemm{};
  gemm.product = p.wgrad ? GemmSm80::Product::kWgrad : GemmSm80::Product::kMm;
  gemm.order = static_cast<GemmSm80::Order>(p.order);
  gemm.run_bits = p.run_bits;
  gemm.a_width = gemm.b_width = 8;
  gemm.rows_x = p.rows_x;
  gemm.rows_y = p.rows_y;
  gemm.m = p.m;
  gemm.n = p.n;
  gemm.groups = p.groups;
  gemm.metadata.kind = static_cast<MetadataKind>(p.kind);
  gemm.metadata.data = p.data;
  gemm.metadata.offset = p.offset;
  gemm.metadata.count = p.count;
  if (p.gated) gemm.epilogue.activation = Activation::kSwiglu;
  const auto grid = static_cast<unsigned>(blocks);
  const auto run = [&](auto mm) {
    constexpr bool kMm = decltype(mm)::value;
    return tile == 0   ? Run<128, 256, 256, 128, kMm, kMm>(gemm, grid, to, most)
           : tile == 1 ? Run<128, 128, 128, 512, kMm, kMm>(gemm, grid, to, most)
                       : Run<64, 128, 128, 512, false, kMm>(gemm, grid, to, most);
  };
  return p.wgrad ? run(std::false_type{}) : run(std::true_type{});
}

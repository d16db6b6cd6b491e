// The kernels of route, dispatch and combine on the host, for test_moe_kernels.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "moe/device/route.cuh"
#include "moe/device/rows.cuh"
#include "moe/device/some_rows.cuh"

using namespace jgg;

extern "C" int route_kernel(const RouteArgs* args) {
  const auto blocks = static_cast<unsigned>(rules::MoeRouteBlocks(args->pairs));
  if (blocks != static_cast<unsigned>(args->blocks)) return 1;
  using namespace device;
  const auto run = [&](unsigned blocks, auto kernel) {
    RunBlocks({blocks, 1}, kRouteThreads, [&] { kernel(*args); });
  };
  if (blocks == 1) {
    run(1, RoutePlace<true>);
  } else {
    run(blocks, RouteCount);
    run(static_cast<unsigned>(args->experts + kRouteWarps - 1) / kRouteWarps, RouteScan);
    run(blocks, RoutePlace<false>);
  }
  return 0;
}

extern "C" void scan_kernel(const RouteArgs* args) {
  RunBlocks(
      {static_cast<unsigned>(args->experts + device::kRouteWarps - 1) / device::kRouteWarps, 1},
      device::kRouteThreads, [&] { device::RouteScan(*args); });
}

// Sizes are in bytes, of x, rows and ct as far as a kernel reads them.
struct Operands {
  PairRows pairs;
  const void *x, *rows;
  const float* weight;
  void *out, *drows;
  float* dweight;
  int64_t x_bytes, rows_bytes;
};

static void SetReadable(const Operands& o) {
  readable.clear();
  readable.emplace_back(static_cast<const char*>(o.x), o.x_bytes);
  readable.emplace_back(static_cast<const char*>(o.rows), o.rows_bytes);
}

template <typename Params>
static void RunRows(void (*kernel)(Params), const Params& params) {
  const RowsGrid& grid = params.grid;
  RunBlocks({static_cast<unsigned>(grid.blocks), 1},
            static_cast<unsigned>(grid.lanes * grid.tokens), [&] { kernel(params); });
}

template <DType kOf, DType kOther, int kAtOnce>
static void Run(const Operands& o, int which) {
  constexpr int kEach = 8 / kAtOnce;
  const auto x = static_cast<const uint4*>(o.x), rows = static_cast<const uint4*>(o.rows);
  const RowsGrid grid = MakeRowsGrid(o.pairs, which == 2 ? 0 : kEach);
  if (which == 0 || which == 3) {
    const device::DispatchParams params{o.pairs,   grid, x, o.weight, static_cast<uint4*>(o.out),
                                        which == 0};
    if (o.weight) {
      RunRows(device::DispatchKernel<kOf, true, kEach>, params);
    } else {
      RunRows(device::DispatchKernel<kOf, false, kEach>, params);
    }
  } else if (which == 1) {
    RunRows(device::CombineKernel<kOf, kOther, kAtOnce, kEach>,
            device::CombineParams{o.pairs, grid, rows, o.weight, o.out});
  } else {
    RunRows(device::CombineBackwardKernel<kOf, kOther, kAtOnce>,
            device::CombineBackwardParams{o.pairs, grid, o.x, rows, o.weight, o.drows, o.dweight});
  }
}

// 0: dispatch, 1: combine, 2: its backward pass. Element types: float32 alone; bfloat16 and
// float16, alone and beside float32.
extern "C" int rows_kernel(const Operands* o, int which, int dtypes, int at_once) {
  SetReadable(*o);
  const auto with = [&](auto function) {
    switch (at_once) {
      case 2: return function(std::integral_constant<int, 2>{});
      case 4: return function(std::integral_constant<int, 4>{});
      default: return function(std::integral_constant<int, 8>{});
    }
  };
  with([&](auto at_once) {
    constexpr int kAtOnce = at_once.value;
    switch (dtypes) {
      case 0: return Run<DType::kF32, DType::kF32, kAtOnce>(*o, which);
      case 1: return Run<DType::kBF16, DType::kBF16, kAtOnce>(*o, which);
      case 2: return Run<DType::kBF16, DType::kF32, kAtOnce>(*o, which);
      default: return Run<DType::kF16, DType::kF32, kAtOnce>(*o, which);
    }
  });
  return 0;
}

// Rows of some tokens, sorted and copied.
extern "C" int some_rows_kernel(const SomeRows* rows, int64_t x_bytes) {
  readable.clear();
  readable.emplace_back(static_cast<const char*>(rows->x), x_bytes);
  RunBlocks({static_cast<unsigned>(rows->tokens), 1}, device::kSomeThreads,
            [&] { device::SomeRowsKernel(*rows); });
  return 0;
}

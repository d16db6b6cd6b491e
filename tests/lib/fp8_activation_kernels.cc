// The kernels of FP8's activations on the host, for test_fp8_activation_kernels.py.
#include "cuda_on_host.h"
//
#include "fp8/device/quantize_tiles.cuh"

// Shared memory whose size is given at a launch, which a kernel declares as extern.
#undef __shared__
#define __shared__
#include "fp8/device/activation.cuh"

namespace jgg::fp8::device {
uint4 memory[1 << 13];
}  // namespace jgg::fp8::device

using namespace jgg;
using namespace jgg::fp8::device;

namespace {

struct Result {
  void *codes, *scales;
};

struct Operands {
  const void *h, *d;
  const float* row_scale;
  const int32_t* sizes;
  const uint32_t *row_seed, *column_seed;  // both, or null
  Result forward, by_rows, by_columns, activated;
  float* sums;
  uint16_t *activation, *dh, *scaled;  // what is quantized: (R, F), (R, 2F), (R, F)
  int64_t rows, columns, along, groups;
};

QuantizeParams ParamsOf(const Result& to, int64_t along, const uint32_t* seed) {
  QuantizeParams p{};
  p.matrices = 1;
  p.along = along;
  p.blocks = CeilDiv(along, kBlock);
  p.seed = seed;
  p.codes = static_cast<uint8_t*>(to.codes);
  p.scales = static_cast<float*>(to.scales);
  return p;
}

constexpr DType kOf = DType::kBF16;

template <Activation kActivation>
void Run(const Operands& o) {
  readable = {{static_cast<const char*>(o.h), 4 * o.rows * o.columns},
              {static_cast<const char*>(o.d), 2 * o.rows * o.columns},
              {reinterpret_cast<const char*>(o.row_scale), 4 * o.rows}};
  for (const uint32_t* seed : {o.row_seed, o.column_seed}) {
    if (seed) readable.emplace_back(reinterpret_cast<const char*>(seed), 8);
  }
  const auto groups = static_cast<int32_t>(o.groups);
  const auto tiles = static_cast<int32_t>(o.along / kBlock);
  std::vector<int32_t> starts(groups + 1), firsts(groups + 1);
  std::vector<TileRows> of_tiles(tiles);
  RunBlocks({1, 1}, kScanThreads, [&] {
    GroupsKernel(o.sizes, groups, static_cast<int32_t>(o.rows), starts.data(), firsts.data(),
                 of_tiles.data(), tiles);
  });
  QuantizeParams forward = ParamsOf(o.forward, o.columns, nullptr);
  forward.x = static_cast<const uint8_t*>(o.h);
  forward.rows = o.rows;
  forward.columns = o.columns;
  forward.inside = starts.data() + groups;
  RunBlocks({static_cast<unsigned>(RowsBlocks<kOf>(forward)), 1}, kRowsThreads, [&] {
    RowsKernel<kOf, Element::kE4M3, false, true, ActivatedRow<kOf, kActivation>>(forward);
  });
  ActivationParams p{};
  p.h = static_cast<const uint8_t*>(o.h);
  p.d = static_cast<const uint8_t*>(o.d);
  p.row_scale = o.row_scale;
  p.rows = o.rows;
  p.columns = o.columns;
  p.groups = of_tiles.data();
  p.sums = o.sums;
  p.by_rows = ParamsOf(o.by_rows, 2 * o.columns, o.row_seed);
  p.by_columns = ParamsOf(o.by_columns, o.along, o.column_seed);
  p.activated = ParamsOf(o.activated, o.along, nullptr);
  const auto blocks = static_cast<unsigned>(tiles * (o.columns / kBlock));
  RunBlocks({blocks, 1}, kActivationThreads, [&] {
    o.row_seed ? ActivationBackwardKernel<kOf, kActivation, true>(p)
               : ActivationBackwardKernel<kOf, kActivation, false>(p);
  });
  // What the kernels quantize, eight columns after the other.
  const auto* h = static_cast<const uint16_t*>(o.h);
  const auto* d = static_cast<const uint16_t*>(o.d);
  for (int64_t i = 0; i < o.rows * o.columns; i += 8) {
    const int64_t row = i / o.columns, gate = i + row * o.columns;
    for (const bool scaled : {false, true}) {
      Eight<kOf> x[3];
      std::memcpy(&x[0], h + gate, 16);
      std::memcpy(&x[1], h + gate + o.columns, 16);
      std::memcpy(&x[2], d + i, 16);
      DifferentiateEight<kOf, kActivation>(x, scaled ? o.row_scale[row] : 1.0f);
      std::memcpy((scaled ? o.scaled : o.activation) + i, &x[2], 16);
      if (!scaled) continue;
      std::memcpy(o.dh + gate, &x[0], 16);
      std::memcpy(o.dh + gate + o.columns, &x[1], 16);
    }
  }
}

}  // namespace

// Returns whether it is a gated activation that kernels have.
extern "C" bool activation_kernels(const Operands* o, const char* name) {
  const auto activation = ToActivation(name);
  if (!activation || !IsGated(*activation)) return false;
  DispatchActivation<true>(*activation, [&](auto of) { Run<decltype(of)::kActivation>(*o); });
  return true;
}

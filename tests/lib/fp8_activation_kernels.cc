// The kernels of FP8's activations on the host, for test_fp8_activation_kernels.py.
#include "fp8_activations.h"

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
  ActivationValues values;  // what is quantized
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

template <Activation kActivation>
void Run(const Operands& o) {
  readable = {{static_cast<const char*>(o.h), 4 * o.rows * o.columns},
              {static_cast<const char*>(o.d), 2 * o.rows * o.columns},
              {reinterpret_cast<const char*>(o.row_scale), 4 * o.rows}};
  for (const uint32_t* seed : {o.row_seed, o.column_seed}) {
    if (seed) readable.emplace_back(reinterpret_cast<const char*>(seed), 8);
  }
  const Groups groups(o.sizes, o.groups, o.rows, o.along);
  QuantizeParams forward = ParamsOf(o.forward, o.columns, nullptr);
  forward.x = static_cast<const uint8_t*>(o.h);
  forward.rows = o.rows;
  forward.columns = o.columns;
  forward.inside = groups.inside();
  RunBlocks({static_cast<unsigned>(RowsBlocks<kOf>(forward)), 1}, kRowsThreads, [&] {
    RowsKernel<kOf, Element::kE4M3, false, true, ActivatedRow<kOf, kActivation>>(forward);
  });
  ActivationParams p{};
  p.h = static_cast<const uint8_t*>(o.h);
  p.d = static_cast<const uint8_t*>(o.d);
  p.row_scale = o.row_scale;
  p.rows = o.rows;
  p.columns = o.columns;
  p.groups = groups.tiles.data();
  p.sums = o.sums;
  p.by_rows = ParamsOf(o.by_rows, 2 * o.columns, o.row_seed);
  p.by_columns = ParamsOf(o.by_columns, o.along, o.column_seed);
  p.activated = ParamsOf(o.activated, o.along, nullptr);
  const auto blocks = static_cast<unsigned>(groups.tiles.size() * (o.columns / kBlock));
  RunBlocks({blocks, 1}, kActivationThreads, [&] {
    o.row_seed ? ActivationBackwardKernel<kOf, kActivation, true>(p)
               : ActivationBackwardKernel<kOf, kActivation, false>(p);
  });
  FindValues<kActivation>(o.h, o.d, o.row_scale, o.rows, o.columns, o.values);
}

}  // namespace

// Returns whether it is a gated activation that kernels have.
extern "C" bool activation_kernels(const Operands* o, const char* name) {
  return ByName(name, [&](auto of) { Run<decltype(of)::kActivation>(*o); });
}

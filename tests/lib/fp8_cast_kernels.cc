// The kernels of matrices with one scale each, and of activations with one, on the host, for
// test_fp8_cast_kernels.py.
#include "fp8_activations.h"
//
#include "fp8/device/cast.cuh"
#include "fp8/device/cast_activation.cuh"
#undef __shared__
#define __shared__
#include "fp8/device/cast_activation_backward.cuh"
#undef __shared__
#define __shared__ static

namespace {

struct Operands {
  const void *x, *d;  // of an activation x is h
  const float *row_scale, *scales;
  const int32_t *sizes, *list;
  const int32_t* wanted;
  void *codes, *turned, *activated, *largest;
  float* sums;
  int64_t matrices, rows, columns, x_lines, along, groups, parts, bytes;
  int32_t dtype, e5m2;
};

Groups GroupsOf(const Operands& o) { return {o.sizes, o.groups, o.rows, o.along}; }

CastParams ParamsOf(const Operands& o, const Groups& groups) {
  CastParams cast{};
  QuantizeParams& p = cast.of;
  p.x = static_cast<const uint8_t*>(o.x);
  p.matrices = o.matrices;
  p.rows = o.rows;
  p.columns = o.columns;
  p.along = o.along;
  p.codes = static_cast<uint8_t*>(o.codes);
  p.list = o.list;
  p.x_lines = o.x_lines;
  p.slice = 2;  // fewer than all blocks of a wide x
  if (o.sizes != nullptr) {
    p.inside = groups.inside();
    if (o.turned != nullptr) p.groups = groups.tiles.data();
  }
  cast.turned = static_cast<uint8_t*>(o.turned);
  cast.known = o.scales;
  cast.largest = static_cast<uint2*>(o.largest);
  cast.wanted = o.wanted;
  readable = {{static_cast<const char*>(o.x), o.bytes},
              {reinterpret_cast<const char*>(o.scales), 4 * o.matrices}};
  if (o.list) readable.emplace_back(reinterpret_cast<const char*>(o.list), 4 * o.rows);
  return cast;
}

unsigned BlocksOf(const Operands& o) {
  const int64_t tiles = CeilDiv(o.turned != nullptr ? o.along : o.rows, kBlock);
  return static_cast<unsigned>(CastBlocks(tiles, o.columns));
}

template <DType kOf>
void Cast(const Operands& o) {
  const Groups groups = GroupsOf(o);
  const CastParams cast = ParamsOf(o, groups);
  // Fewer blocks along y than matrices, so that each of them has several.
  const auto y = static_cast<unsigned>(CeilDiv(o.matrices, 2));
  if (o.scales == nullptr) {
    return RunBlocks({static_cast<unsigned>(o.parts), y}, kLargestThreads,
                     [&] { LargestKernel<kOf>(cast); });
  }
  RunBlocks({BlocksOf(o), y}, kSquareThreads, [&] {
    o.e5m2 ? CastKernel<kOf, Element::kE5M2>(cast) : CastKernel<kOf, Element::kE4M3>(cast);
  });
}

template <Activation kActivation>
void Activated(const Operands& o) {
  const Groups groups = GroupsOf(o);
  ActivatedParams cast{};
  cast.of.x = static_cast<const uint8_t*>(o.x);
  cast.of.rows = o.rows;
  cast.of.columns = o.columns;
  cast.of.codes = static_cast<uint8_t*>(o.codes);
  cast.of.inside = groups.inside();
  cast.known = o.scales;
  cast.largest = static_cast<uint2*>(o.largest);
  readable = {{static_cast<const char*>(o.x), 4 * o.rows * o.columns},
              {reinterpret_cast<const char*>(o.scales), 4}};
  RunBlocks({static_cast<unsigned>(o.parts), 1}, kLargestThreads,
            [&] { ActivatedKernel<kOf, kActivation>(cast); });
}

template <Activation kActivation>
void Backward(const Operands& o) {
  const Groups groups = GroupsOf(o);
  ActivationCastParams p{};
  p.h = static_cast<const uint8_t*>(o.x);
  p.d = static_cast<const uint8_t*>(o.d);
  p.row_scale = o.row_scale;
  p.rows = o.rows;
  p.columns = o.columns;
  p.along = o.along;
  p.inside = groups.inside();
  p.groups = groups.tiles.data();
  p.known = o.scales;
  p.codes = static_cast<uint8_t*>(o.codes);
  p.turned = static_cast<uint8_t*>(o.turned);
  p.activated = static_cast<uint8_t*>(o.activated);
  p.sums = o.sums;
  p.largest = static_cast<uint2*>(o.largest);
  readable = {{static_cast<const char*>(o.x), 4 * o.rows * o.columns},
              {static_cast<const char*>(o.d), 2 * o.rows * o.columns},
              {reinterpret_cast<const char*>(o.row_scale), 4 * o.rows},
              {reinterpret_cast<const char*>(o.scales), 8}};
  if (o.scales == nullptr) {
    return RunBlocks({static_cast<unsigned>(o.parts), 1}, kLargestThreads,
                     [&] { DifferentiatedKernel<kOf, kActivation>(p); });
  }
  const auto blocks = static_cast<unsigned>(groups.tiles.size() * (o.columns / kBlock));
  RunBlocks({blocks, 1}, kActivationThreads, [&] {
    o.e5m2 ? ActivationCastKernel<kOf, kActivation, Element::kE5M2>(p)
           : ActivationCastKernel<kOf, kActivation, Element::kE4M3>(p);
  });
}

}  // namespace

extern "C" void codes_kernel(const Operands* o) {
  const Groups groups = GroupsOf(*o);
  const CastParams cast = ParamsOf(*o, groups);
  RunBlocks({BlocksOf(*o), 1}, kSquareThreads, [&] { CodesKernel<>(cast); });
}

extern "C" void cast_kernels(const Operands* o) {
  switch (static_cast<DType>(o->dtype)) {
    case DType::kF32: return Cast<DType::kF32>(*o);
    case DType::kBF16: return Cast<DType::kBF16>(*o);
    case DType::kF16: return Cast<DType::kF16>(*o);
  }
}

// These return whether it is a gated activation that kernels have.
extern "C" bool activated_kernel(const Operands* o, const char* name) {
  return ByName(name, [&](auto of) { Activated<decltype(of)::kActivation>(*o); });
}

extern "C" bool backward_kernel(const Operands* o, const char* name) {
  return ByName(name, [&](auto of) { Backward<decltype(of)::kActivation>(*o); });
}

extern "C" bool activation_values(const Operands* o, const char* name, uint16_t* activation,
                                  uint16_t* dh, uint16_t* scaled) {
  return ByName(name, [&](auto of) {
    FindValues<decltype(of)::kActivation>(o->x, o->d, o->row_scale, o->rows, o->columns,
                                          {activation, dh, scaled});
  });
}

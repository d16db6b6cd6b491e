// The kernels of matrices with one scale each, and of activations with one, on the host, for
// test_fp8_cast_kernels.py.
#include "cuda_on_host.h"
//
#include "fp8/device/cast.cuh"

// Shared memory whose size is given at a launch, which a kernel declares as extern.
#undef __shared__
#define __shared__
#include "fp8/device/activation.cuh"
#undef __shared__
#define __shared__ static
#include "fp8/device/cast_activation.cuh"
#undef __shared__
#define __shared__
#include "fp8/device/cast_activation_backward.cuh"
#undef __shared__
#define __shared__ static

namespace jgg::fp8::device {
uint4 memory[1 << 13];
}  // namespace jgg::fp8::device

using namespace jgg;
using namespace jgg::fp8::device;

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

struct Groups {
  std::vector<int32_t> starts, firsts;
  std::vector<TileRows> tiles;

  explicit Groups(const Operands& o)
      : starts(o.groups + 1), firsts(o.groups + 1), tiles(CeilDiv(o.along, kBlock)) {
    if (o.sizes == nullptr) return;
    RunBlocks({1, 1}, kScanThreads, [&] {
      GroupsKernel(o.sizes, static_cast<int32_t>(o.groups), static_cast<int32_t>(o.rows),
                   starts.data(), firsts.data(), tiles.data(), static_cast<int32_t>(tiles.size()));
    });
  }
};

CastParams ParamsOf(const Operands& o, Groups& groups) {
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
    p.inside = groups.starts.data() + o.groups;
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
  Groups groups(o);
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

constexpr DType kOf = DType::kBF16;

template <Activation kActivation>
void Activated(const Operands& o) {
  Groups groups(o);
  ActivatedParams cast{};
  cast.of.x = static_cast<const uint8_t*>(o.x);
  cast.of.rows = o.rows;
  cast.of.columns = o.columns;
  cast.of.codes = static_cast<uint8_t*>(o.codes);
  cast.of.inside = groups.starts.data() + o.groups;
  cast.known = o.scales;
  cast.largest = static_cast<uint2*>(o.largest);
  readable = {{static_cast<const char*>(o.x), 4 * o.rows * o.columns},
              {reinterpret_cast<const char*>(o.scales), 4}};
  RunBlocks({static_cast<unsigned>(o.parts), 1}, kLargestThreads,
            [&] { ActivatedKernel<kOf, kActivation>(cast); });
}

template <Activation kActivation>
void Backward(const Operands& o) {
  Groups groups(o);
  ActivationCastParams p{};
  p.h = static_cast<const uint8_t*>(o.x);
  p.d = static_cast<const uint8_t*>(o.d);
  p.row_scale = o.row_scale;
  p.rows = o.rows;
  p.columns = o.columns;
  p.along = o.along;
  p.inside = groups.starts.data() + o.groups;
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

// Values before the cast, of each kernel of an activation, eight columns after the other: (R, F),
// (R, 2F), (R, F).
template <Activation kActivation>
void Values(const Operands& o, uint16_t* activation, uint16_t* dh, uint16_t* scaled) {
  const auto* h = static_cast<const uint16_t*>(o.x);
  const auto* d = static_cast<const uint16_t*>(o.d);
  for (int64_t i = 0; i < o.rows * o.columns; i += 8) {
    const int64_t row = i / o.columns, gate = i + row * o.columns;
    for (const bool scales : {false, true}) {
      Eight<kOf> x[3];
      std::memcpy(&x[0], h + gate, 16);
      std::memcpy(&x[1], h + gate + o.columns, 16);
      std::memcpy(&x[2], d + i, 16);
      DifferentiateEight<kOf, kActivation>(x, scales ? o.row_scale[row] : 1.0f);
      std::memcpy((scales ? scaled : activation) + i, &x[2], 16);
      if (!scales) continue;
      std::memcpy(dh + gate, &x[0], 16);
      std::memcpy(dh + gate + o.columns, &x[1], 16);
    }
  }
}

template <typename Function>
bool ByName(const char* name, Function function) {
  const auto activation = ToActivation(name);
  if (!activation || !IsGated(*activation)) return false;
  DispatchActivation<true>(*activation, function);
  return true;
}

}  // namespace

extern "C" void codes_kernel(const Operands* o) {
  Groups groups(*o);
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
  return ByName(name,
                [&](auto of) { Values<decltype(of)::kActivation>(*o, activation, dh, scaled); });
}

// FP8's activations on the host, for fp8_activation_kernels.cc and fp8_cast_kernels.cc.
#pragma once

#include "cuda_on_host.h"
//
#include "fp8/device/quantize_tiles.cuh"

// Shared memory whose size is given at a launch, which a kernel declares as extern.
#undef __shared__
#define __shared__
#include "fp8/device/activation.cuh"
#undef __shared__
#define __shared__ static

namespace jgg::fp8::device {
uint4 memory[1 << 13];
}  // namespace jgg::fp8::device

using namespace jgg;
using namespace jgg::fp8::device;

namespace {

constexpr DType kOf = DType::kBF16;

// Rows of groups, and their tiles of padded rows. Without sizes there are none.
struct Groups {
  std::vector<int32_t> starts, firsts;
  std::vector<TileRows> tiles;

  Groups(const int32_t* sizes, int64_t groups, int64_t rows, int64_t along)
      : starts(groups + 1), firsts(groups + 1), tiles(CeilDiv(along, kBlock)) {
    if (sizes == nullptr) return;
    RunBlocks({1, 1}, kScanThreads, [&] {
      GroupsKernel(sizes, static_cast<int32_t>(groups), static_cast<int32_t>(rows), starts.data(),
                   firsts.data(), tiles.data(), static_cast<int32_t>(tiles.size()));
    });
  }

  const int32_t* inside() const { return &starts.back(); }
};

// Where values before they become codes go: (R, F), (R, 2F), (R, F).
struct ActivationValues {
  uint16_t *activation, *dh, *scaled;
};

// Values that each kernel of an activation of h (R, 2F) and d (R, F) stores as codes, eight columns
// after the other.
template <Activation kActivation>
void FindValues(const void* h_of, const void* d_of, const float* row_scale, int64_t rows,
                int64_t columns, const ActivationValues& to) {
  const auto* h = static_cast<const uint16_t*>(h_of);
  const auto* d = static_cast<const uint16_t*>(d_of);
  for (int64_t i = 0; i < rows * columns; i += 8) {
    const int64_t row = i / columns, gate = i + row * columns;
    for (const bool scaled : {false, true}) {
      Eight<kOf> x[3];
      std::memcpy(&x[0], h + gate, 16);
      std::memcpy(&x[1], h + gate + columns, 16);
      std::memcpy(&x[2], d + i, 16);
      DifferentiateEight<kOf, kActivation>(x, scaled ? row_scale[row] : 1.0f);
      std::memcpy((scaled ? to.scaled : to.activation) + i, &x[2], 16);
      if (!scaled) continue;
      std::memcpy(to.dh + gate, &x[0], 16);
      std::memcpy(to.dh + gate + columns, &x[1], 16);
    }
  }
}

// Whether it is a gated activation that kernels have: function is called with it.
template <typename Function>
bool ByName(const char* name, Function function) {
  const auto activation = ToActivation(name);
  if (!activation || !IsGated(*activation)) return false;
  DispatchActivation<true>(*activation, function);
  return true;
}

}  // namespace

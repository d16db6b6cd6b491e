// What grouped_mm/device/compute_sm80.cuh needs of CuTe to be compiled for the host: layouts of two
// static axes, and names of instructions, which nothing calls.
#pragma once

#include <cstdint>
#include <type_traits>

namespace cute {

using std::conditional_t, std::is_same_v;

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
using _1 = Int<1>;
template <typename...>
struct Shape {};
template <typename...>
struct Stride {};

template <typename, typename>
struct Layout;

template <int kM, int kK, int kStepM, int kStepK>
struct Layout<Shape<Int<kM>, Int<kK>>, Stride<Int<kStepM>, Int<kStepK>>> {
  static constexpr int kRows = kM, kColumns = kK;
  constexpr int operator()(int m, int k) const { return m * kStepM + k * kStepK; }
};

template <int, typename Of>
constexpr Int<1> stride(Of) {
  return {};
}

// Bits kBase + kShift and up are added to bits kBase and up, without carries.
template <int kBits, int kBase, int kShift>
struct Swizzle {};

template <typename Of, int kBits, int kBase, int kShift>
struct Swizzled : Of {
  constexpr int operator()(int m, int k) const {
    const int at = Of{}(m, k);
    return at ^ (at >> kShift & ((1 << kBits) - 1) << kBase);
  }
};

template <typename Of, int kBits, int kBase, int kShift>
constexpr Swizzled<Of, kBits, kBase, kShift> composition(Swizzle<kBits, kBase, kShift>, Of) {
  return {};
}

// Atoms one after another, down the first axis, then along the second.
template <typename Atom, int kM, int kK>
struct Tiled {
  constexpr int operator()(int m, int k) const {
    constexpr int kRows = Atom::kRows, kColumns = Atom::kColumns;
    const int atom = m / kRows + k / kColumns * (kM / kRows);
    return Atom{}(m % kRows, k % kColumns) + atom * kRows * kColumns;
  }
};

template <typename Atom, int kM, int kK>
constexpr Tiled<Atom, kM, kK> tile_to_shape(Atom, Shape<Int<kM>, Int<kK>>) {
  return {};
}

struct alignas(16) uint128_t {
  uint64_t low, high;
};

struct Instruction {
  template <typename... T>
  static void copy(T&&...) {}
  template <typename... T>
  static void fma(T&&...) {}
};
using SM75_U32x4_LDSM_N = Instruction;
using SM75_U16x8_LDSM_T = Instruction;
using SM80_16x8x8_F32TF32TF32F32_TN = Instruction;
using SM80_16x8x16_F32F16F16F32_TN = Instruction;
using SM80_16x8x16_F32BF16BF16F32_TN = Instruction;

}  // namespace cute

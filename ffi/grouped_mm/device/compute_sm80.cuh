// Shared memory to registers, and the products: tensor-op tiles (bf16, f16, tf32) and float32 FMA.
//
// Both classes say how they want a tile of A or B to lie in shared memory (ATile, BTile), hold the
// sums of a kM x kN tile, add the product of one slice to them, and write them out.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cute/layout.hpp"
#include "cute/layout_composed.hpp"
#include "cute/swizzle.hpp"
#include "cute/swizzle_layout.hpp"
#include "cutlass/numeric_types.h"

namespace jgg::device {

// A kMn x kK tile in shared memory: lines as in global memory, pieces of 16 bytes swizzled within
// kLine elements of a line so that the reads below meet no bank twice. The swizzle repeats every
// kPeriod lines.
template <int kMn, int kK, bool kKMajor, int kLine, int kPeriod_, int kBits, int kBase, int kShift>
struct SharedTile {
  static constexpr int kPeriod = kPeriod_;
  using Shape = cute::Shape<cute::Int<kMn>, cute::Int<kK>>;
  using PlainAtom = cute::Layout<
      cute::Shape<cute::Int<kKMajor ? 8 : kLine>, cute::Int<kKMajor ? kLine : 8>>,
      cute::Stride<cute::Int<kKMajor ? kLine : 1>, cute::Int<kKMajor ? 1 : kLine>>>;
  using Atom = decltype(cute::composition(cute::Swizzle<kBits, kBase, kShift>{}, PlainAtom{}));
  using Layout = decltype(cute::tile_to_shape(Atom{}, Shape{}));
  using Plain = decltype(cute::tile_to_shape(PlainAtom{}, Shape{}));
};

constexpr int Log2(int value) { return value <= 1 ? 0 : 1 + Log2(value / 2); }

// For ldmatrix, which reads 16 bytes of each of 8 lines.
template <typename Element, bool kKMajor, int kMn, int kK, int kPiece = 16 / sizeof(Element),
          int kLine = kKMajor || kMn < 8 * kPiece ? (kKMajor ? kK : kMn) : 8 * kPiece>
using MatrixTile =
    SharedTile<kMn, kK, kKMajor, kLine, 8, Log2(kLine / kPiece), Log2(kPiece), 3>;

// For reads of 4-byte elements: 8 consecutive m (or n) of each of 4 lines.
template <int kMn, int kK, int kLine = kMn < 32 ? kMn : 32>
using WordTile = SharedTile<kMn, kK, false, kLine, 4, Log2(kLine / 8), 3, 2>;

// For warps that read whole lines.
template <int kMn, int kK>
using LineTile = SharedTile<kMn, kK, false, kMn, 1, 0, 2, 3>;

// mma.sync m16n8k16 (k8 for tf32) on a kM x kN tile by kWarpsM x kWarpsN warps.
template <typename Element, bool kAKMajor, bool kBKMajor, int kM, int kN, int kK, int kWarpsM,
          int kWarpsN>
class TensorOps {
 public:
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;

 private:
  static constexpr bool kTf32 = sizeof(Element) == 4;
  static constexpr int kPiece = 16 / sizeof(Element);  // elements in 16 bytes
  static constexpr int kStep = 2 * kPiece;             // values of k per instruction
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN;
  static constexpr int kAtomsM = kWarpM / 16, kAtomsN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kK % kStep == 0);

  // tf32 has no transposing ldmatrix: MN-major tiles are read word by word.
  template <bool kKMajor, int kMn>
  using TileOf = cute::conditional_t<kTf32 && !kKMajor, WordTile<kMn, kK>,
                                     MatrixTile<Element, kKMajor, kMn, kK>>;

 public:
  using ATile = TileOf<kAKMajor, kM>;
  using BTile = TileOf<kBKMajor, kN>;

  __device__ TensorOps() {
    const int warp = threadIdx.x / 32;
    m_ = warp / kWarpsN * kWarpM;
    n_ = warp % kWarpsN * kWarpN;
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
      for (int j = 0; j < kAtomsN; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums_[i][j][v] = 0.0f;
      }
    }
  }

  // sums += A B^T over the kK values of k in these slices.
  __device__ void Add(const Element* a, const Element* b) {
#pragma unroll(kTf32 ? 1 : kK / kStep)  // tf32 fragments of two steps do not fit the registers
    for (int k = 0; k < kK; k += kStep) {
      uint32_t values_a[kAtomsM][4], values_b[kAtomsN / 2][4];
#pragma unroll
      for (int i = 0; i < kAtomsM; ++i) {
        Load<kAKMajor, true, typename ATile::Layout>(a, m_ + 16 * i, k, values_a[i]);
      }
#pragma unroll
      for (int j = 0; j < kAtomsN / 2; ++j) {
        Load<kBKMajor, false, typename BTile::Layout>(b, n_ + 16 * j, k, values_b[j]);
      }
#pragma unroll
      for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
        for (int j = 0; j < kAtomsN; ++j) {
          const uint32_t* pair = &values_b[j / 2][j % 2 * 2];
          float(&c)[4] = sums_[i][j];
          Instruction::fma(c[0], c[1], c[2], c[3], values_a[i][0], values_a[i][1], values_a[i][2],
                           values_a[i][3], pair[0], pair[1], c[0], c[1], c[2], c[3]);
        }
      }
    }
  }

  // Write the sums to a tile of floats of this layout (m, n).
  template <typename Layout>
  __device__ void Write(float* tile, Layout layout) const {
    const int row = m_ + threadIdx.x % 32 / 4, column = n_ + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
      for (int j = 0; j < kAtomsN; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* to = tile + layout(row + 16 * i + 8 * half, column + 8 * j);
          if constexpr (decltype(cute::stride<1>(layout))::value == 1) {
            *reinterpret_cast<float2*>(to) =
                make_float2(sums_[i][j][2 * half], sums_[i][j][2 * half + 1]);
          } else {
            to[0] = sums_[i][j][2 * half];
            to[cute::stride<1>(layout)] = sums_[i][j][2 * half + 1];
          }
        }
      }
    }
  }

 private:
  using Instruction = cute::conditional_t<
      kTf32, cute::SM80_16x8x8_F32TF32TF32F32_TN,
      cute::conditional_t<cute::is_same_v<Element, cutlass::half_t>,
                          cute::SM80_16x8x16_F32F16F16F32_TN,
                          cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

  // A 16 x kStep block as an instruction takes it: four 8 x 16-byte matrices. Their order is
  // (m, k) = (0, 0) (8, 0) (0, 1) (8, 1) for A, and (0, 0) (0, 1) (8, 0) (8, 1) for two of B.
  template <bool kKMajor, bool kIsA, typename Layout>
  __device__ static void Load(const Element* tile, int mn, int k, uint32_t (&values)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTf32 && !kKMajor) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int high_mn = kIsA ? v % 2 : v / 2, high_k = kIsA ? v / 2 : v % 2;
        values[v] = words[Layout{}(mn + 8 * high_mn + lane / 4, k + 4 * high_k + lane % 4)];
      }
    } else {
      // Lanes 8 v to 8 v + 7 name the lines of matrix v.
      const int v = lane / 8;
      const int high_mn = kIsA ? v % 2 : v / 2, high_k = kIsA ? v / 2 : v % 2;
      const int line = lane % 8;
      const int at = kKMajor ? Layout{}(mn + 8 * high_mn + line, k + kPiece * high_k)
                             : Layout{}(mn + 8 * high_mn, k + 8 * high_k + line);
      const auto& from = *reinterpret_cast<const cute::uint128_t*>(tile + at);
      if constexpr (kKMajor) {
        cute::SM75_U32x4_LDSM_N::copy(from, values[0], values[1], values[2], values[3]);
      } else {
        cute::SM75_U16x8_LDSM_T::copy(from, values[0], values[1], values[2], values[3]);
      }
    }
    if constexpr (kTf32) {
      // To nearest, ties away from zero: the tensor cores would truncate.
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(values[v]) : "f"(__uint_as_float(values[v])));
      }
    }
  }

  float sums_[kAtomsM][kAtomsN][4];
  int m_, n_;
};

// Float32 FMA by kThreadsM x kThreadsN threads of kRows x kColumns sums each.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, int kK, int kThreadsM, int kThreadsN>
struct FloatOps {
  static constexpr int kThreads = kThreadsM * kThreadsN;
  static constexpr int kRows = kM / kThreadsM, kColumns = kN / kThreadsN;
  template <bool kKMajor, int kMn>
  using TileOf =
      cute::conditional_t<kKMajor, MatrixTile<float, true, kMn, kK>, LineTile<kMn, kK>>;
  using ATile = TileOf<kAKMajor, kM>;
  using BTile = TileOf<kBKMajor, kN>;

  float sums[kRows][kColumns];

  __device__ FloatOps() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    m_ = warp / kWarpsN * kLanesM + lane / kLanesN;
    n_ = warp % kWarpsN * kLanesN + lane % kLanesN;
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[i][j] = 0.0f;
    }
  }

  // sums += A B^T over the kK values of k in these slices.
  __device__ void Add(const float* a, const float* b) {
#pragma unroll 2
    for (int k = 0; k < kK; k += kStep) {
      float values_a[kStep][kRows], values_b[kStep][kColumns];
      Load<kAKMajor, typename ATile::Layout, kThreadsM>(a, m_, k, values_a);
      Load<kBKMajor, typename BTile::Layout, kThreadsN>(b, n_, k, values_b);
#pragma unroll
      for (int step = 0; step < kStep; ++step) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            sums[i][j] = fmaf(values_a[step][i], values_b[step][j], sums[i][j]);
          }
        }
      }
    }
  }

  // Write the sums to a tile of floats of this layout (m, n).
  template <typename Layout>
  __device__ void Write(float* tile, Layout layout) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        tile[layout(Position<kAKMajor, kThreadsM>(m_, i), Position<kBKMajor, kThreadsN>(n_, j))] =
            sums[i][j];
      }
    }
  }

 private:
  static constexpr int kStep = 2;  // values of k held in registers at a time
  // A warp reads few lines of A and many of B.
  static constexpr int kLanesN = kThreadsM >= 16 ? 8 : 32, kLanesM = 32 / kLanesN;
  static constexpr int kWarpsN = kThreadsN / kLanesN;
  static_assert(kThreadsN % kLanesN == 0 && kThreadsM % kLanesM == 0);
  static_assert(kRows % 4 == 0 && kColumns % 4 == 0);

  // The m (or n) of a thread's i-th value: such that reads are of 16 bytes along m where that is
  // contiguous, and neighbouring threads read neighbouring lines where it is not.
  template <bool kKMajor, int kThreadsMn>
  __device__ static int Position(int thread, int i) {
    return kKMajor ? thread + kThreadsMn * i : 4 * (thread + kThreadsMn * (i / 4)) + i % 4;
  }

  template <bool kKMajor, typename Layout, int kThreadsMn, int kCount>
  __device__ static void Load(const float* tile, int thread, int k,
                              float (&values)[kStep][kCount]) {
    if constexpr (kKMajor) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int mn = Position<kKMajor, kThreadsMn>(thread, i);
        const float2 pair = *reinterpret_cast<const float2*>(tile + Layout{}(mn, k));
        values[0][i] = pair.x;
        values[1][i] = pair.y;
      }
    } else {
#pragma unroll
      for (int step = 0; step < kStep; ++step) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          const int mn = Position<kKMajor, kThreadsMn>(thread, i);
          const float4 four = *reinterpret_cast<const float4*>(tile + Layout{}(mn, k + step));
          values[step][i] = four.x;
          values[step][i + 1] = four.y;
          values[step][i + 2] = four.z;
          values[step][i + 3] = four.w;
        }
      }
    }
  }

  int m_, n_;
};

}  // namespace jgg::device

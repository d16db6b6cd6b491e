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
#include "grouped_mm/device/scan.cuh"

namespace jgg::device {

// A kMn x kK tile in shared memory: lines as in global memory, pieces of 16 bytes swizzled within
// kLine elements of a line so that the reads below meet no bank twice. The swizzle repeats every
// kPeriod lines.
template <int kMn, int kK, bool kKMajor, int kLine, int kPeriod_, int kBits, int kBase, int kShift>
struct SwizzledTile {
  static constexpr bool kTransposed = false;  // it is copied as it lies in global memory
  static constexpr int kPeriod = kPeriod_;
  static constexpr int kElements = kMn * kK;
  using Shape = cute::Shape<cute::Int<kMn>, cute::Int<kK>>;
  using PlainAtom =
      cute::Layout<cute::Shape<cute::Int<kKMajor ? 8 : kLine>, cute::Int<kKMajor ? kLine : 8>>,
                   cute::Stride<cute::Int<kKMajor ? kLine : 1>, cute::Int<kKMajor ? 1 : kLine>>>;
  using Atom = decltype(cute::composition(cute::Swizzle<kBits, kBase, kShift>{}, PlainAtom{}));
  using Layout = decltype(cute::tile_to_shape(Atom{}, Shape{}));
  using Plain = decltype(cute::tile_to_shape(PlainAtom{}, Shape{}));

  // The offset of (mn + mn_more, k + k_more) from that of (mn, k), where no bit is set in both mn
  // and mn_more, or in both k and k_more. With constants this costs an xor, or nothing.
  __device__ static int Move(int offset, int mn_more, int k_more) {
    constexpr int kSwizzled = ((1 << kBits) - 1) << kBase;
    const int more = Layout{}(mn_more, k_more);
    return (offset ^ (more & kSwizzled)) + (more & ~kSwizzled);
  }
};

// For ldmatrix, which reads 16 bytes of each of 8 lines.
template <typename Element, bool kKMajor, int kMn, int kK, int kPiece = 16 / sizeof(Element),
          int kWhole = kKMajor ? kK : kMn, int kLine = kWhole < 8 * kPiece ? kWhole : 8 * kPiece>
using MatrixTile = SwizzledTile<kMn, kK, kKMajor, kLine, 8, Log2(kLine / kPiece), Log2(kPiece), 3>;

// For reads of 4-byte elements: 8 consecutive m (or n) of each of 4 lines.
template <int kMn, int kK, int kLine = kMn < 32 ? kMn : 32>
using WordTile = SwizzledTile<kMn, kK, false, kLine, 4, Log2(kLine / 8), 3, 2>;

// For reads of whole lines: MN-major, however the operand lies in memory, and padded, so that
// transposing copies meet few banks twice.
template <int kMn, int kK, bool kKMajor>
struct LineTile {
  static constexpr bool kTransposed = kKMajor;
  static constexpr int kPeriod = 1;
  static constexpr int kStride = kMn + 4;
  static constexpr int kElements = kStride * kK;
  using Layout = cute::Layout<cute::Shape<cute::Int<kMn>, cute::Int<kK>>,
                              cute::Stride<cute::_1, cute::Int<kStride>>>;
  using Plain = Layout;

  __device__ static int Move(int offset, int mn_more, int k_more) {
    return offset + Layout{}(mn_more, k_more);
  }
};

// mma.sync m16n8k16 (k8 for tf32) on a kM x kN tile by kWarpsM x kWarpsN warps, kWarpsK times: each
// such group takes its share of every slice.
template <typename Element, bool kAKMajor, bool kBKMajor, int kM, int kN, int kK, int kWarpsM,
          int kWarpsN, int kWarpsK = 1>
class TensorOps {
 public:
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpsK * 32;

 private:
  static constexpr bool kTf32 = sizeof(Element) == 4;
  static constexpr int kPiece = 16 / sizeof(Element);  // elements in 16 bytes
  static constexpr int kStep = 2 * kPiece;             // values of k per instruction
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN;
  static constexpr int kAtomsM = kWarpM / 16, kAtomsN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kK % (kStep * kWarpsK) == 0);

  // tf32 has no transposing ldmatrix: MN-major tiles are read word by word.
  template <bool kKMajor, int kMn>
  using TileOf = cute::conditional_t<kTf32 && !kKMajor, WordTile<kMn, kK>,
                                     MatrixTile<Element, kKMajor, kMn, kK>>;

 public:
  static constexpr int kSums = kM * kN * kWarpsK;  // of all threads
  using ATile = TileOf<kAKMajor, kM>;
  using BTile = TileOf<kBKMajor, kN>;

  __device__ TensorOps() {
    a_ = First<kAKMajor, true, typename ATile::Layout>(WarpM());
    b_ = First<kBKMajor, false, typename BTile::Layout>(WarpN());
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

  // sums += A B^T over the kK values of k in these slices. `meanwhile` is called once, when the
  // first loads are under way.
  template <typename Meanwhile>
  __device__ void Add(const Element* a, const Element* b, Meanwhile meanwhile) {
#pragma unroll
    for (int k = 0; k < kK; k += kStep * kWarpsK) {
      uint32_t values_a[kAtomsM][4], values_b[kAtomsN / 2][4];
#pragma unroll
      for (int i = 0; i < kAtomsM; ++i) {
        Load<kAKMajor, true, ATile>(a, a_, 16 * i, k, values_a[i]);
      }
#pragma unroll
      for (int j = 0; j < kAtomsN / 2; ++j) {
        Load<kBKMajor, false, BTile>(b, b_, 16 * j, k, values_b[j]);
      }
      if (k == 0) meanwhile();
#pragma unroll
      for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
        for (int j = 0; j < kAtomsN; ++j) {
          const uint32_t* pair = &values_b[j / 2][j % 2 * 2];
          float (&c)[4] = sums_[i][j];
          Instruction::fma(c[0], c[1], c[2], c[3], values_a[i][0], values_a[i][1], values_a[i][2],
                           values_a[i][3], pair[0], pair[1], c[0], c[1], c[2], c[3]);
        }
      }
    }
  }

  // function(n, sum) for each of this thread's sums, in an order that is always the same.
  template <typename Function>
  __device__ void ForEachSum(Function function) {
    const int column = WarpN() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
      for (int j = 0; j < kAtomsN; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) function(column + 8 * j + v % 2, sums_[i][j][v]);
      }
    }
  }

  // Write the sums to a tile of floats of this layout (m, n). All threads call it, and may read the
  // tile afterwards.
  template <typename Layout>
  __device__ void Write(float* tile, Layout layout) const {
#pragma unroll
    for (int group = 0; group < kWarpsK; ++group) {
      if (group == WarpK()) WriteMine(tile, layout, group > 0);
      __syncthreads();
    }
  }

 private:
  template <typename Layout>
  __device__ void WriteMine(float* tile, Layout layout, bool add) const {
    const int row = WarpM() + threadIdx.x % 32 / 4, column = WarpN() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kAtomsM; ++i) {
#pragma unroll
      for (int j = 0; j < kAtomsN; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* to = tile + layout(row + 16 * i + 8 * half, column + 8 * j);
          float2 pair = make_float2(sums_[i][j][2 * half], sums_[i][j][2 * half + 1]);
          if constexpr (decltype(cute::stride<1>(layout))::value == 1) {
            float2* both = reinterpret_cast<float2*>(to);
            if (add) pair = make_float2(both->x + pair.x, both->y + pair.y);
            *both = pair;
          } else {
            constexpr int kNext = decltype(cute::stride<1>(layout))::value;
            to[0] = add ? to[0] + pair.x : pair.x;
            to[kNext] = add ? to[kNext] + pair.y : pair.y;
          }
        }
      }
    }
  }

  using Instruction =
      cute::conditional_t<kTf32, cute::SM80_16x8x8_F32TF32TF32F32_TN,
                          cute::conditional_t<cute::is_same_v<Element, cutlass::half_t>,
                                              cute::SM80_16x8x16_F32F16F16F32_TN,
                                              cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

  __device__ static int WarpK() { return threadIdx.x / 32 / (kWarpsM * kWarpsN); }
  __device__ static int WarpM() { return threadIdx.x / 32 / kWarpsN % kWarpsM * kWarpM; }
  __device__ static int WarpN() { return threadIdx.x / 32 % kWarpsN * kWarpN; }

  // An instruction takes a 16 x kStep block as four 8 x 16-byte matrices. Their order is
  // (m, k) = (0, 0) (8, 0) (0, 1) (8, 1) for A, and (0, 0) (0, 1) (8, 0) (8, 1) for two of B.
  __device__ static constexpr int HighMn(bool is_a, int v) { return is_a ? v % 2 : v / 2; }
  __device__ static constexpr int HighK(bool is_a, int v) { return is_a ? v / 2 : v % 2; }

  // Where this lane reads in its warp's first block. For ldmatrix it names a line of a matrix
  // (lanes 8 v to 8 v + 7 name the lines of matrix v); otherwise it reads its own word of matrix 0.
  template <bool kKMajor, bool kIsA, typename Layout>
  __device__ static int First(int mn) {
    const int lane = threadIdx.x % 32, k = kStep * WarpK();
    if (kTf32 && !kKMajor) return Layout{}(mn + lane / 4, k + lane % 4);
    const int high_mn = 8 * HighMn(kIsA, lane / 8), high_k = HighK(kIsA, lane / 8);
    return kKMajor ? Layout{}(mn + high_mn + lane % 8, k + kPiece * high_k)
                   : Layout{}(mn + high_mn, k + 8 * high_k + lane % 8);
  }

  template <bool kKMajor, bool kIsA, typename Tile>
  __device__ static void Load(const Element* tile, int first, int mn, int k,
                              uint32_t (&values)[4]) {
    if constexpr (kTf32 && !kKMajor) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        values[v] = words[Tile::Move(first, mn + 8 * HighMn(kIsA, v), k + 4 * HighK(kIsA, v))];
      }
    } else {
      const auto& from = *reinterpret_cast<const cute::uint128_t*>(tile + Tile::Move(first, mn, k));
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
  int a_, b_;
};

// Float32 FMA by kThreadsM x kThreadsN threads of kRows x kColumns sums each, kThreadsK times: each
// such group takes its share of every slice.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, int kK, int kThreadsM, int kThreadsN,
          int kThreadsK = 1>
class FloatOps {
 public:
  static constexpr int kThreads = kThreadsM * kThreadsN * kThreadsK;
  static constexpr int kSums = kM * kN * kThreadsK;  // of all threads
  using ATile = LineTile<kM, kK, kAKMajor>;
  using BTile = LineTile<kN, kK, kBKMajor>;

  __device__ FloatOps() {
    // Neighbouring lanes read the same 16 bytes of A, or of B, so the hardware makes one read of
    // theirs.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_m = kLanesN == 32 ? 0 : lane % 2 + lane / 16 * 2;
    const int lane_n = kLanesN == 32 ? lane : lane / 2 % 8;
    m_ = 4 * (warp / kWarpsN % kWarpsM * kLanesM + lane_m);
    n_ = 4 * (warp % kWarpsN * kLanesN + lane_n);
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums_[i][j] = 0.0f;
    }
  }

  // As TensorOps::Add. A thread loads the values of k + 1 before it uses those of k.
  template <typename Meanwhile>
  __device__ void Add(const float* a, const float* b, Meanwhile meanwhile) {
    constexpr int kShare = kK / kThreadsK;
    float values_a[2][kRows], values_b[2][kColumns];
    a += m_ + Group() * kShare * ATile::kStride;
    b += n_ + Group() * kShare * BTile::kStride;
    Load<kThreadsM>(a, values_a[0]);
    Load<kThreadsN>(b, values_b[0]);
    meanwhile();
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (k + 1 < kShare) {
        Load<kThreadsM>(a + (k + 1) * ATile::kStride, values_a[(k + 1) % 2]);
        Load<kThreadsN>(b + (k + 1) * BTile::kStride, values_b[(k + 1) % 2]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          sums_[i][j] = fmaf(values_a[k % 2][i], values_b[k % 2][j], sums_[i][j]);
        }
      }
    }
  }

  // As TensorOps::ForEachSum.
  template <typename Function>
  __device__ void ForEachSum(Function function) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) function(n_ + Position<kThreadsN>(j), sums_[i][j]);
    }
  }

  // As TensorOps::Write.
  template <typename Layout>
  __device__ void Write(float* tile, Layout layout) const {
#pragma unroll
    for (int group = 0; group < kThreadsK; ++group) {
      if (group == Group()) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            float& to = tile[layout(m_ + Position<kThreadsM>(i), n_ + Position<kThreadsN>(j))];
            to = group > 0 ? to + sums_[i][j] : sums_[i][j];
          }
        }
      }
      __syncthreads();
    }
  }

 private:
  static constexpr int kRows = kM / kThreadsM, kColumns = kN / kThreadsN;
  static constexpr int kLanesN = kThreadsM % 4 == 0 && kThreadsN < 32 ? 8 : 32;
  static constexpr int kLanesM = 32 / kLanesN;
  static constexpr int kWarpsM = kThreadsM / kLanesM, kWarpsN = kThreadsN / kLanesN;
  static_assert(kThreadsN % kLanesN == 0 && kThreadsM % kLanesM == 0 && kK % kThreadsK == 0);
  static_assert(kRows % 4 == 0 && kColumns % 4 == 0);

  __device__ static int Group() { return threadIdx.x / (kThreadsM * kThreadsN); }

  // A thread's values are fours of neighbours. Between two of its fours lie those of all other
  // threads.
  template <int kThreadsMn>
  __device__ static constexpr int Position(int i) {
    return 4 * kThreadsMn * (i / 4) + i % 4;
  }

  template <int kThreadsMn, int kCount>
  __device__ static void Load(const float* from, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + Position<kThreadsMn>(i));
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }

  float sums_[kRows][kColumns];
  int m_, n_;
};

}  // namespace jgg::device

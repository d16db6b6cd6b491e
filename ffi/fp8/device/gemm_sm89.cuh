// The kernel of gemm_sm89.h. Slices, tiles and results are those of grouped_mm's pipeline
// (grouped_mm/device/pipelined_sm80.cuh); a slice has 64 codes of each line.
//
// Tensor cores of these GPUs add up products of codes with about 14 bits. So they add up 64 codes
// at a time, half a block, and float32 sums get those times the scales.
#pragma once

#include <cstdint>

#include "fp8/device/instructions_sm89.cuh"
#include "fp8/gemm_sm89.h"
#include "grouped_mm/device/pipelined_sm80.cuh"

namespace jgg::device {

// The scales of a tile: those of its first row and column, and the first block of k. Rows and
// columns (mm: blocks of 128 of them) behind the last ones have those of the last ones, because any
// will do. It lies in shared memory, so that it costs the main loop no registers.
struct PlacesOfScales {
  const float *of_rows, *of_columns;
  int last_row, last_column;
};

// As PipelinedCopy, of lines along k. It keeps less in registers: what follows from the thread's
// number is the same for both operands.
template <typename Of>
class LineCopy {
  using Tile = typename Of::Tile;
  static constexpr int kSize = 2, kPiece = 8, kPerLine = Of::kPerLine, kLines = Of::kLines;

 public:
  static constexpr int kPieces = Of::kPieces, kBytes = Of::kBytes;

  __device__ void Begin(const cutlass::bfloat16_t* origin, int64_t line, int count) {
    const unsigned thread = ThreadAnew();
    const int first = thread / kPerLine;
    from_ = reinterpret_cast<const char*>(origin + first * line + thread % kPerLine * kPiece);
    lines_ = count - first;
  }

  __device__ void Piece(uint32_t slice, int i, int left, const Strides& strides) {
    const unsigned thread = threadIdx.x;
    const int k = thread % kPerLine * kPiece;
    typename Tile::Plain plain;
    const int to = typename Tile::Layout{}(thread / kPerLine, k) * kSize;
    const bool wanted = left > 0 && lines_ > i * kLines;
    CopyAsync(slice + to + plain(i * kLines, 0) * kSize, from_, wanted, left <= k);
    Advance(from_, i == kPieces - 1 ? strides.slice : strides.piece);
  }

 private:
  const char* from_;
  int lines_;  // from this thread's first one on
};

using Fp8Slices = PipelinedConfig<cutlass::bfloat16_t, true, true, 128, 256, 4, 1, 128, true>;

template <bool kWgrad_, bool kE5M2_>
struct Fp8Sm89Config : Fp8Slices {
  static constexpr bool kWgrad = kWgrad_, kE5M2 = kE5M2_;
  using CopyA = LineCopy<Fp8Slices::CopyA>;
  using CopyB = LineCopy<Fp8Slices::CopyB>;
  static constexpr bool kHasOptions = false, kAddsExisting = kWgrad;
  static constexpr bool kKeepsEmpty = kWgrad;
  struct SharedMemory : Fp8Slices::SharedMemory {
    PlacesOfScales scales;
  };
};

// The kernel's argument.
struct PipelinedFp8Sm89 {
  Fp8GemmSm89 fp8;
  Strides a, b;
};

template <typename Config>
PipelinedFp8Sm89 MakePipelinedFp8(const Fp8GemmSm89& fp8) {
  return {fp8, Fp8Slices::CopyA::StridesOf(fp8.gemm.a_line, false),
          Fp8Slices::CopyB::StridesOf(fp8.gemm.b_line, false)};
}

// A ring of slices that copies fill, and how far they are: as in Pipeline.
template <typename Config>
class SliceRing {
 protected:
  static constexpr int kStages = Config::kStages, kK = Config::kK;
  static constexpr int kPieces = Config::CopyA::kPieces + Config::CopyB::kPieces;

  __device__ SliceRing(const Strides& a, const Strides& b, const void* ring)
      : strides_a_(a), strides_b_(b), ring_(SharedAddress(ring)) {}

  // Begin to copy a tile's first slices, all that there is room for but one. copy_a_, copy_b_ and
  // left_ are those of the tile.
  __device__ void BeginSlices() {
    write_ = ring_;
#pragma unroll 1
    for (int slice = 0; slice < kStages - 1; ++slice) {
      if (left_ > 0) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) CopyPiece(i);
      }
      EndSlice();
    }
  }

  // The slice that is read next has arrived, and nobody reads the one that is filled next.
  __device__ static void Meet() {
    WaitForCopies<kStages - 2>();
    __syncthreads();
  }

  __device__ uint32_t Next(uint32_t slice) const {
    slice += Config::kStageBytes;
    return slice == ring_ + kStages * Config::kStageBytes ? ring_ : slice;
  }

  __device__ void CopyPiece(int i) {
    constexpr int kPiecesA = Config::CopyA::kPieces;
    if (i < kPiecesA) {
      copy_a_.Piece(write_, i, left_, strides_a_);
    } else {
      copy_b_.Piece(write_ + Config::CopyA::kBytes, i - kPiecesA, left_, strides_b_);
    }
  }

  __device__ void EndSlice() {
    EndCopies();
    left_ -= kK;
    write_ = Next(write_);
  }

  const Strides &strides_a_, &strides_b_;
  const uint32_t ring_;
  typename Config::CopyA copy_a_;
  typename Config::CopyB copy_b_;
  int left_;  // k of the slice that is copied next, and all behind it
  uint32_t write_;
};

__device__ inline void ClearSums(WarpSums& sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[i][j][v] = 0.0f;
    }
  }
}

// The main loop. A warp makes its 64 x 64 sums of a slice in eight parts of 32 x 16, each in two
// steps of 32 codes. Before a step's products it loads the next step's values into other registers.
template <typename Config>
class Fp8Pipeline : SliceRing<Config> {
  using Pair = typename Config::Element;
  using Ring = SliceRing<Config>;
  using Ring::kStages, Ring::kK, Ring::kPieces, Ring::ring_, Ring::left_, Ring::copy_a_,
      Ring::copy_b_;
  using Ring::Meet, Ring::Next, Ring::CopyPiece, Ring::EndSlice;
  static constexpr bool kWgrad = Config::kWgrad;
  static constexpr int kBlock = 128;  // codes, or columns, that share a scale

 public:
  __device__ Fp8Pipeline(const PipelinedFp8Sm89& arguments, typename Config::SharedMemory& shared)
      : Ring(arguments.a, arguments.b, shared.ring),
        fp8_(arguments.fp8),
        scales_(shared.scales),
        a_(typename Config::OperandA(threadIdx.x / 32 / Config::kWarpsN * 16).First()),
        b_(typename Config::OperandB(threadIdx.x / 32 % Config::kWarpsN * kWarpTile).First()) {}

  // As Pipeline::Begin.
  __device__ void Begin(const Tile& tile) {
    const Segment& segment = tile.segment;
    const GemmSm80& gemm = fp8_.gemm;
    const Pair* a = static_cast<const Pair*>(gemm.a);
    const Pair* b = static_cast<const Pair*>(gemm.b);
    const int64_t n0 = tile.n0;
    const int columns = tile.n_count;
    PlacesOfScales scales;
    scales.last_row = tile.m_hi - 1;
    if (kWgrad) {
      const int64_t first = segment.x_start;  // the same of both, in pairs
      left_ = segment.length;
      copy_a_.Begin(a + tile.row0 * gemm.a_line + first, gemm.a_line, tile.m_hi);
      copy_b_.Begin(b + n0 * gemm.b_line + first, gemm.b_line, columns);
      const int64_t block = first / (kBlock / 2);
      scales.of_rows = fp8_.a_scales + tile.row0 * fp8_.a_scale_line + block;
      scales.of_columns = fp8_.b_scales + n0 * fp8_.b_scale_line + block;
      scales.last_column = columns - 1;
    } else {
      const int64_t row = segment.x_start + (tile.row0 - segment.y_start);
      left_ = static_cast<int>(gemm.k);
      copy_a_.Begin(a + row * gemm.a_line, gemm.a_line, tile.m_hi);
      copy_b_.Begin(b + segment.weight * gemm.b_group + n0 * gemm.b_line, gemm.b_line, columns);
      const int line = static_cast<int>(n0) / kBlock;
      scales.of_rows = fp8_.a_scales + row * fp8_.a_scale_line;
      scales.of_columns =
          fp8_.b_scales + (segment.weight * int64_t{fp8_.b_scale_lines} + line) * fp8_.b_scale_line;
      scales.last_column = fp8_.b_scale_lines - 1 - line;
    }
    // Nobody reads those of the tile before any more: warps have met since.
    if (ThreadAnew() == 0) scales_ = scales;
    Ring::BeginSlices();
  }

  __device__ void Clear() { ClearSums(sums_); }

  // Add the products of the segment whose copies have begun, for the first `rows` rows of the tile.
  __device__ void Add(int rows) {
    if (rows > 3 * Config::kRowsApart) {
      AddRows<4>();
    } else if (rows > 2 * Config::kRowsApart) {
      AddRows<3>();
    } else if (rows > Config::kRowsApart) {
      AddRows<2>();
    } else {
      AddRows<1>();
    }
  }

  __device__ const WarpSums& Sums() const { return sums_; }

 private:
  // 32 rows of A, of either half of the codes; and 16 columns of B, of this step and the next.
  struct Fragments {
    uint32_t a[2][2][4], b[2][4];
  };

  __device__ static unsigned Lane() { return static_cast<unsigned>(ThreadAnew()) % 32; }
  __device__ static unsigned Warp() { return static_cast<unsigned>(ThreadAnew()) / 32; }
  __device__ static int WarpRow() { return Warp() / Config::kWarpsN * 16; }
  __device__ static int WarpColumn() { return Warp() % Config::kWarpsN * kWarpTile; }

  // Steps of a slice, of 16 kAtoms rows of this warp: the codes' halves come and go in turns, then
  // the columns, then the rows.
  template <int kAtoms>
  static constexpr int kSteps = kAtoms > 2 ? 16 : 8;
  __device__ static constexpr int RowHalf(int step) { return step / 8; }
  __device__ static constexpr int Quarter(int step) { return step / 2 % 4; }

  template <int kAtoms>
  __device__ void AddRows() {
    constexpr int kLast = kSteps<kAtoms> - 1;
    uint32_t read = ring_;
    Fragments values;
    Meet();
    slice_ = 0;
    Load<kAtoms, 0>(read, values);
    AllStepsButLast<kAtoms>(read, values);
    // `left_` is of the slice that is copied next. The loop begins where warps have met: see
    // Pipeline::AddRows.
#pragma unroll 1
    while (left_ > (1 - kStages) * kK) {
      read = Next(read);
      Load<kAtoms, 0>(read, values);
      Multiply<kAtoms, kLast>(values);
      ++slice_;
      AllStepsButLast<kAtoms>(read, values);
    }
    Multiply<kAtoms, kLast>(values);
  }

  template <int kAtoms>
  __device__ __forceinline__ void AllStepsButLast(uint32_t read, Fragments& values) {
    Step<kAtoms, 0>(read, values);
    EndSlice();
    Meet();
  }

  // Step kStep and those behind it. A slice is copied a piece at a time, between the products.
  template <int kAtoms, int kStep>
  __device__ __forceinline__ void Step(uint32_t read, Fragments& values) {
    constexpr int kTurns = kSteps<kAtoms> - 1;
    if constexpr (kStep < kTurns) {
      Load<kAtoms, kStep + 1>(read, values);
      LoadScales<kAtoms, kStep>();
#pragma unroll
      for (int i = kStep * kPieces / kTurns; i < (kStep + 1) * kPieces / kTurns; ++i) CopyPiece(i);
      Multiply<kAtoms, kStep>(values);
      Step<kAtoms, kStep + 1>(read, values);
    }
  }

  template <int kAtoms, int kStep>
  __device__ __forceinline__ void Load(uint32_t slice, Fragments& values) const {
    using A = typename Config::OperandA;
    using B = typename Config::OperandB;
    constexpr int kCodes = kStep % 2, kRows = 2 * RowHalf(kStep);
    if constexpr (Quarter(kStep) == 0) {
      const uint32_t from = slice + ExclusiveOr(a_, A::kOtherStep * kCodes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (kRows + i < kAtoms) {
          LoadMatrices<false>(from + A::BlockBytes(kRows + i), values.a[kCodes][i]);
        }
      }
    }
    const uint32_t from = slice + Config::CopyA::kBytes + ExclusiveOr(b_, B::kOtherStep * kCodes);
    LoadMatrices<false>(from + B::BlockBytes(Quarter(kStep)), values.b[kCodes]);
  }

  // Those that a step needs and the one before it does not have. A lane has those of one row and of
  // one column, of 32 each.
  template <int kAtoms, int kStep>
  __device__ __forceinline__ void LoadScales() {
    const unsigned lane = Lane();
    if constexpr (kStep % 8 == 0) {
      const int atom = 2 * RowHalf(kStep) + lane / 16;
      const int row = WarpRow() + Config::kRowsApart * atom + lane % 16;
      of_row_ = Scale(scales_.of_rows, min(row, scales_.last_row), fp8_.a_scale_line);
    }
    if constexpr (kWgrad ? kStep == 0 || kStep == 2 : kStep == 0) {
      constexpr int kHalf = kStep / 2;
      const int column = kWgrad ? WarpColumn() + 32 * kHalf + lane : WarpColumn() / kBlock;
      of_columns_[kHalf] =
          Scale(scales_.of_columns, min(column, scales_.last_column), fp8_.b_scale_line);
    }
  }

  __device__ float Scale(const float* scales, int line, int64_t blocks) const {
    return __ldg(scales + line * blocks + slice_ / 2);
  }

  // A step's products. The second step of a part adds them, times the scales, to this warp's sums.
  template <int kAtoms, int kStep>
  __device__ __forceinline__ void Multiply(const Fragments& values) {
    constexpr int kRows = 2 * RowHalf(kStep), kCodes = kStep % 2;
    const auto& b = values.b[kCodes];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kRows + i >= kAtoms) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        MultiplyCodes<Config::kE5M2, kCodes == 0>(part_[i][j], values.a[kCodes][i], b[2 * j],
                                                  b[2 * j + 1]);
      }
    }
    if constexpr (kCodes == 1) Promote<kAtoms, kStep>();
  }

  template <int kAtoms, int kStep>
  __device__ __forceinline__ void Promote() {
    constexpr unsigned kAll = 0xffffffffu;
    constexpr int kRows = 2 * RowHalf(kStep), kQuarter = Quarter(kStep);
    const unsigned lane = Lane();
    if constexpr (kQuarter == 0) {
      const float of_row = kWgrad ? of_row_ : of_row_ * of_columns_[0];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        row_scales_[i / 2][i % 2] = __shfl_sync(kAll, of_row, 8 * i + lane / 4);
      }
    }
    float column_scales[2][2];
    if constexpr (kWgrad) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = kQuarter % 2 * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        column_scales[i / 2][i % 2] = __shfl_sync(kAll, of_columns_[kQuarter / 2], from);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kRows + i >= kAtoms) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float value = part_[i][j][v];
          if constexpr (kWgrad) value *= column_scales[j][v % 2];
          float& sum = sums_[kRows + i][2 * kQuarter + j][v];
          sum = fmaf(value, row_scales_[i][v / 2], sum);
        }
      }
    }
  }

  const Fp8GemmSm89& fp8_;
  PlacesOfScales& scales_;
  const uint32_t a_, b_;  // where this lane's values of the first step begin in a slice
  int slice_;
  float of_row_, of_columns_[2];  // this lane's
  float row_scales_[2][2];        // those of this thread's rows in a part
  float part_[2][2][4];
  WarpSums sums_;
};

// All tiles of a block. A round adds up and stores a tile, and in between begins the copies of the
// next one.
template <typename Config>
__device__ __forceinline__ void Fp8GemmSm89Block(const PipelinedFp8Sm89& arguments,
                                                 typename Config::SharedMemory& shared) {
  const GemmSm80& gemm = arguments.fp8.gemm;
  typename Config::Work work(gemm, shared.schedule);
  Fp8Pipeline<Config> pipeline(arguments, shared);
  const auto has_rows = [](const Tile& tile) {
    return tile.weight >= 0 && tile.segment.length > 0;
  };
  int at = 0;  // which of two places has the tile; negative: there is none behind it
  if (!work.Next(shared.tiles[at])) return;
  if (has_rows(shared.tiles[at])) pipeline.Begin(shared.tiles[at]);
#pragma unroll 1
  do {
    const Tile& tile = shared.tiles[at];
    at ^= 1;
    if (!work.Next(shared.tiles[at])) at -= 2;
    pipeline.Clear();
    if (has_rows(tile)) pipeline.Add(tile.m_hi);
    if (at >= 0 && has_rows(shared.tiles[at])) pipeline.Begin(shared.tiles[at]);
    WarpResults<Config>::Store(gemm, tile, 0, pipeline.Sums(), shared.Results());
  } while (at >= 0);
}

#ifdef __CUDACC__
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    Fp8GemmSm89Kernel(const __grid_constant__ PipelinedFp8Sm89 arguments) {
  extern __shared__ __align__(128) unsigned char memory[];
  Fp8GemmSm89Block<Config>(arguments, *reinterpret_cast<typename Config::SharedMemory*>(memory));
}
#endif

}  // namespace jgg::device
